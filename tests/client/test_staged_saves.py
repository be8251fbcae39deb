"""Saves of an engine on a GPU: blocks are staged, and reach their slots at a later step."""

from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.blocks.envelope import HEADER_BYTES, stored_bytes
from holdfast.client import loader as loader_module
from holdfast.client.rank_transfers import RankTransfers, TransferOptions
from holdfast.client.staged_saves import COPY_BEFORE_S
from holdfast.client.tasks import GroupTask, LoadTask, SaveTask
from holdfast.devices.base import Pages
from holdfast.devices.cuda import device as device_module
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.registry import DeviceOptions
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.testing.page_locks import TestLocks
from holdfast.testing.payloads import key_of
from holdfast.testing.played_client import PlayedClient, PlayedConnection
from holdfast.testing.simulated_driver import SimulatedDriver
from holdfast.wire.local.messages import (
    Abort,
    Commit,
    Committed,
    Fetch,
    Fetched,
    Release,
    Released,
    Reserve,
    Reserved,
)

OPTIONS = TransferOptions(5.0)
LAYERS, COUNT, PAGE_BYTES, PER_BLOCK = 3, 32, 96, 2
PAYLOAD = LAYERS * PER_BLOCK * PAGE_BYTES
RECORD = stored_bytes(PAYLOAD)
KEYS = [key_of(number) for number in range(4)]
SEEDS = range(6)


def step(loads=(), saves=(), tokens=0):
    """What a rank has to do in one step."""
    return SimpleNamespace(loads=list(loads), saves=list(saves), tokens=tokens)


class Node:
    """Gives slots out in turn; `late` replies to reservations come when a test says so."""

    def __init__(self):
        self.tickets, self.committed, self.aborted = {}, [], []
        self.late, self.outcome, self.refuses = False, "ok", None

    def __call__(self, message):
        match message:
            case Fetch():
                count = len(message.keys) // 16
                return Fetched(7, [at * RECORD for at in range(count)], {"host": count}, "ok", "")
            case Release():
                return Released(True)
            case Reserve():
                if self.refuses is not None:
                    return self.refuses
                if self.late:
                    return None
                ticket = len(self.tickets) + 1
                count = len(message.keys) // 16
                taken = sum(len(places) for places in self.tickets.values())
                self.tickets[ticket] = [(4 + taken + at) * RECORD for at in range(count)]
                return Reserved(ticket, self.tickets[ticket], self.outcome)
            case Commit():
                self.committed.append(message.ticket)
                return Committed(len(self.tickets[message.ticket]))
            case Abort():
                self.aborted.append(message.ticket)
        return None


class Harness:
    def __init__(self, seed=0, options=OPTIONS):
        self.now = 0.0
        self.driver = SimulatedDriver(seed)
        self.node = Node()
        self.client = PlayedClient(self.node, arena_bytes=32 * RECORD)
        self.link = PlayedConnection(self.client)
        self.memory = np.random.default_rng(seed).integers(
            0, 256, (LAYERS, COUNT, PAGE_BYTES), np.uint8
        )
        bases = tuple(self.memory[layer].ctypes.data for layer in range(LAYERS))
        pages = Pages.uniform(bases, PAGE_BYTES, PAGE_BYTES, COUNT, PER_BLOCK)
        self.device = CudaDevice(self.driver, pages, DeviceOptions(step_blocks=4), self.memory)
        self.side = RankTransfers(self.link, [self.device], options, now=lambda: self.now)
        self.locks = TestLocks(self.driver, self.client.arena, RECORD)
        for chunk in range(32):
            self.locks.lock(chunk)
        self.side._locks.present = lambda client: self.locks

    def begin(self, pages, keys):
        save = SaveTask("r", (b"".join(keys),), (b"p" * 16,), (b"s" * 8,), 2, pages)
        work = step(saves=[save], tokens=64)
        self.side.begin(work)
        return work

    def step(self, pages, keys):
        """Run a step that saves blocks; the engine's next work overwrites their pages."""
        work = self.begin(pages, keys)
        before = self.block(pages)
        self.side.save(work)
        self.driver.compute(lambda: self.memory.__setitem__((slice(None), pages), 0xEE))
        return before

    def idle(self, steps=200):
        for _ in range(steps):
            self.side.begin(step())
            self.side.save(step())
            if not self.side.report(step()):
                return

    def block(self, pages):
        return [
            b"".join(self.memory[layer, page].tobytes() for layer in range(LAYERS) for page in ids)
            for ids in zip(pages[::2], pages[1::2], strict=True)
        ]

    def slots(self, ticket):
        starts = [place + HEADER_BYTES for place in self.node.tickets[ticket]]
        return [bytes(self.client.arena.view[start : start + PAYLOAD]) for start in starts]


@pytest.fixture(autouse=True)
def small_stages(monkeypatch):
    monkeypatch.setattr(device_module, "PIECE_BYTES", 2 * PAYLOAD)
    monkeypatch.setattr(device_module, "SAVE_S", 600.0)  # this machine may be busy
    monkeypatch.setattr(loader_module, "COPY_S", 60.0)
    monkeypatch.setattr("holdfast.client.rank_transfers.REST_S", 0.0)
    monkeypatch.setattr("holdfast.client.rank_transfers.POLL_S", 0.0)


def counted(harness):
    """The calls that were counted, by operation and outcome."""
    counts = harness.side.counts.data
    return {name: number for name, number in counts.items() if name.startswith("calls/")}


@pytest.fixture
def harness():
    harness = Harness()
    yield harness
    harness.side.close()
    assert not harness.driver.faults
    assert not harness.locks.uses
    assert harness.device.staged_blocks == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_saved_blocks_are_those_of_their_step_though_their_pages_are_overwritten(seed):
    harness = Harness(seed)
    first = harness.step([9, 3, 30, 1], KEYS[:2])
    second = harness.step([4, 5], KEYS[2:3])
    harness.idle()
    assert harness.node.committed == [1, 2]
    assert harness.slots(1) + harness.slots(2) == first + second
    assert harness.side.counts.data["saved_blocks"] == 3
    assert harness.driver.calls["bounce"] == 0
    harness.side.begin(step())
    assert harness.side.counts.data["copied_bytes/locked"] == 3 * PAYLOAD
    assert "copied_bytes/bounced" not in harness.side.counts.data
    harness.side.close()
    assert not harness.driver.faults
    assert not harness.locks.uses


def test_a_step_does_not_wait_for_its_slots(harness):
    harness.node.late = True
    before = harness.step([9, 3], KEYS[:1])
    harness.idle(50)
    assert harness.side.report(step()).moving
    assert harness.driver.calls["copy"] == 0
    harness.node.late = False
    harness.idle()
    assert harness.node.committed == [1]
    assert harness.slots(1) == before


def test_blocks_wait_until_they_have_left_their_pages(harness):
    for _ in range(2000):
        harness.driver.compute(lambda: None)
    harness.step([9, 3], KEYS[:1])
    harness.idle(20)
    assert harness.driver.calls["copy"] == 0
    assert not harness.node.committed
    harness.driver.run()
    harness.idle()
    assert harness.node.committed == [1]


def test_slots_reserved_too_long_ago_are_reserved_again_and_not_written(harness):
    harness.node.late = True
    before = harness.step([9, 3], KEYS[:1])
    harness.driver.run()
    harness.now = 2 * COPY_BEFORE_S
    harness.node.late = False
    harness.idle()
    first, second = harness.client.of(Reserve)
    assert first == second
    assert harness.client.forgotten[0] is first  # its slots go back to the node
    assert harness.slots(1) == before


def test_a_save_whose_slots_are_too_old_twice_is_late_and_writes_nothing(harness):
    arena = bytes(harness.client.arena.view)
    harness.node.late = True
    harness.step([9, 3], KEYS[:1])
    harness.driver.run()
    for age in (2, 4):
        harness.now = age * COPY_BEFORE_S
        harness.idle(5)
    assert counted(harness) == {"calls/save/late": 1}
    harness.node.late = False
    harness.idle()
    assert bytes(harness.client.arena.view) == arena
    assert harness.node.committed == []


def test_blocks_that_get_no_slot_are_not_copied(harness):
    harness.client.answer = lambda message: (
        Reserved(1, [-1, 9 * RECORD, -1], "full") if isinstance(message, Reserve) else Committed(1)
    )
    before = harness.step([9, 3, 30, 1, 2, 0], KEYS[:3])
    harness.idle()
    start = 9 * RECORD + HEADER_BYTES
    assert bytes(harness.client.arena.view[start : start + PAYLOAD]) == before[1]
    assert not any(harness.client.arena.view[start + RECORD :])
    assert harness.side.counts.data["calls/save/full"] == 1


def test_a_place_outside_the_arena_costs_the_save_only(harness):
    harness.client.answer = lambda message: (
        Reserved(1, [32 * RECORD], "ok") if isinstance(message, Reserve) else None
    )
    harness.step([9, 3], KEYS[:1])
    harness.idle()
    assert harness.side.counts.data["calls/save/failed"] == 1
    assert [message.ticket for message in harness.client.of(Abort)] == [1]


@pytest.mark.parametrize("when", ["before", "reserving", "copying"])
def test_a_node_that_dies_costs_the_save_only(harness, when):
    if when == "before":
        harness.link.current = None
    work = harness.begin([9, 3], KEYS[:1])
    harness.client.gone = when == "reserving"
    harness.side.save(work)
    harness.driver.run()
    if when == "copying":
        harness.side._saves.poll()
        assert harness.driver.calls["copy"] == 1
    harness.client.gone = when != "before"
    harness.idle()
    assert counted(harness) == {"calls/save/gone": 1}
    assert harness.node.committed == []


def test_nothing_is_copied_to_the_slots_of_a_session_that_ended(harness):
    """After a reconnection the old session's slots belong to others."""
    harness.step([9, 3], KEYS[:1])
    harness.driver.run()
    harness.client.gone = True
    harness.link.current = PlayedClient(Node(), arena_bytes=32 * RECORD)
    before = harness.driver.calls["copy"]
    harness.idle()
    assert harness.driver.calls["copy"] == before
    assert counted(harness) == {"calls/save/gone": 1}


def test_a_refusal_costs_the_save_only(harness):
    harness.node.refuses = RefusedError("no such parent")
    harness.step([9, 3], KEYS[:1])
    harness.idle()
    assert counted(harness) == {"calls/save/refused": 1}


def test_saves_beyond_the_stages_are_counted_and_reserve_nothing(harness):
    harness.node.late = True
    for _ in range(3):
        harness.step([9, 3, 30, 1, 2, 0], KEYS[:3])
    assert counted(harness) == {"calls/save/full": 1}
    assert len(harness.client.of(Reserve)) == 2
    harness.node.late = False
    harness.idle()
    assert len(harness.node.committed) == 2


@pytest.mark.parametrize("call", ["launch", "record", "query", "copy", "create_event"])
def test_a_device_error_costs_the_save_only_and_the_next_one_succeeds(harness, call):
    harness.driver.fail(call)
    harness.step([9, 3], KEYS[:1])
    harness.idle()
    harness.driver.mend()
    before = harness.step([4, 5], KEYS[1:2])
    harness.idle()
    assert harness.side.counts.data["calls/save/failed"] == 1
    assert harness.slots(harness.node.committed[-1]) == before
    first = harness.client.of(Reserve)[0]
    assert first in harness.client.forgotten or [m.ticket for m in harness.client.of(Abort)] == [1]


CALLS = ("copy", "launch", "record", "wait", "pause", "query", "synchronise", "create_event")


@pytest.mark.parametrize("call", [*CALLS, "engine_stream"])
def test_after_a_lasting_error_of_the_gpu_the_worker_is_passive_and_says_so_once(
    harness, call, caplog
):
    harness.driver.fail(call, lasting=True)
    for _ in range(3):
        harness.step([9, 3], KEYS[:1])
        load(harness)
    harness.side.begin(step())
    (said,) = [each for each in caplog.records if "Holdfast is off" in each.message]
    assert said.levelname == "ERROR"
    assert "all requests are computed" in said.message
    assert said.message.endswith(harness.device.failure)
    assert harness.side.counts.data["device_failures"] == 1
    assert harness.link.closed
    assert harness.side.report(step(tokens=1)).passive
    calls, sent, logged = harness.driver.calls.copy(), len(harness.client.sent), len(caplog.records)
    harness.step([9, 3], KEYS[:1])
    assert load(harness) == {9, 3, 30, 1}, "vLLM computes these pages"
    assert harness.driver.calls == calls
    assert len(harness.client.sent) == sent
    assert len(caplog.records) == logged


def test_slots_and_leases_go_back_to_the_node_before_a_worker_becomes_passive(harness):
    harness.step([9, 3], KEYS[:1])
    harness.driver.fail("copy", lasting=True)
    harness.driver.run()
    harness.idle(3)
    load(harness)
    harness.idle(3)
    assert harness.link.closed
    assert [message.ticket for message in harness.client.of(Abort)] == [1]
    assert harness.node.committed == []
    leases = len(harness.client.of(Fetch)), len(harness.client.of(Release))
    assert leases[0] == leases[1]


def test_an_error_of_the_gpu_that_passes_leaves_the_worker_active(harness):
    for call in CALLS:
        harness.driver.fail(call)
        harness.step([9, 3], KEYS[:1])
        load(harness)
    harness.driver.mend()
    harness.side.begin(step())
    assert "device_failures" not in harness.side.counts.data
    assert not harness.side.report(step(tokens=1)).passive


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_in_stages_at_close_are_committed_before_the_session_ends(seed):
    harness = Harness(seed)
    before = harness.step([9, 3], KEYS[:1])
    at_close = []
    harness.link.close = lambda: at_close.append((list(harness.node.committed), harness.slots(1)))
    harness.side.close()
    assert at_close == [([1], before)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_on_the_gpu_fills_its_pages(seed):
    harness = Harness(seed)
    content = np.random.default_rng(1).integers(0, 256, 4 * RECORD, np.uint8)
    harness.client.arena.view[: 4 * RECORD] = content
    work = step([LoadTask("r", (GroupTask((b"".join(KEYS),), [9, 3, 30, 1, 2, 0, 5], 1),), 64)])
    harness.side.begin(work)
    harness.side.start_loads(work)
    while not harness.side.ended():
        harness.side.save(step())
    assert harness.side.failed_pages() == set()
    payload = content[HEADER_BYTES : HEADER_BYTES + PAYLOAD].reshape(LAYERS, PER_BLOCK, PAGE_BYTES)
    assert (harness.memory[:, 9] == payload[:, 1]).all()
    ids = [3, 30, 1, 2, 0, 5]
    starts = [at * RECORD + HEADER_BYTES for at in (1, 2, 3)]
    assert harness.block(ids) == [content[start : start + PAYLOAD].tobytes() for start in starts]
    assert not harness.locks.uses
    harness.side.close()


def load(harness):
    """Run a load of two blocks to its end; return the pages that failed."""
    work = step([LoadTask("r", (GroupTask((b"".join(KEYS[:2]),), [9, 3, 30, 1], 0),), 64)])
    harness.side.begin(work)
    harness.side.start_loads(work)
    while not harness.side.ended():
        harness.side.save(step())
    return harness.side.failed_pages()


@pytest.fixture
def one_block_a_piece(monkeypatch):
    monkeypatch.setattr(device_module, "PIECE_BYTES", PAYLOAD)


def test_a_load_stops_between_two_pieces_if_its_session_ends(one_block_a_piece, harness):
    harness.client.arena.view[: 4 * RECORD] = bytes([7]) * (4 * RECORD)
    before = harness.block([30, 1])
    answers = [True, False]
    harness.client.connected = lambda: answers.pop(0)
    harness.client.answer = lambda message: (
        NodeGoneError("gone") if isinstance(message, Release) else harness.node(message)
    )
    assert load(harness) == {9, 3, 30, 1}
    assert harness.block([9, 3]) == [bytes([7]) * PAYLOAD]
    assert harness.block([30, 1]) == before
    assert counted(harness) == {"calls/fetch/gone": 1}


def test_a_load_that_is_too_late_copies_no_further_piece(one_block_a_piece, monkeypatch):
    harness = Harness(options=TransferOptions(-10.0))
    harness.client.arena.view[: 4 * RECORD] = bytes([7]) * (4 * RECORD)
    before = harness.block([9, 3, 30, 1])
    monkeypatch.setattr(loader_module, "COPY_S", -10.0)
    assert load(harness) == {9, 3, 30, 1}
    assert harness.block([9, 3, 30, 1]) == before
    assert counted(harness) == {"calls/fetch/late": 1}
    assert [message.lease for message in harness.client.of(Release)] == [7]
    harness.side.close()


def test_blocks_of_a_step_that_failed_are_not_saved_and_leave_their_stage():
    harness = Harness()
    harness.begin([9, 3], KEYS[:1])
    harness.side.abandon_saves()
    harness.idle()
    assert harness.node.committed == []
    assert harness.device.staged_blocks == 0
    harness.step([9, 3], KEYS[:1])
    harness.idle()
    assert len(harness.node.committed) == 1
    harness.side.close()
