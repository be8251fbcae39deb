import os
import threading

import numpy as np
import pytest

pytest.importorskip("vllm")

from holdfast.blocks.envelope import HEADER_BYTES, record_bytes
from holdfast.devices.base import Pages
from holdfast.devices.host import HostDevice
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.work import LoadTask, SaveTask, StepWork, WorkerReport
from holdfast.engines.vllm.worker import WorkerSide
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.testing.payloads import key_of, payload_of
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

SETTING = ConnectorSettings("", "default", 0, "", 0.05, 5.0, saves=True)
LAYERS, COUNT, PAGE_BYTES, PER_BLOCK = 3, 32, 96, 2
PAYLOAD = LAYERS * PER_BLOCK * PAGE_BYTES
RECORD = record_bytes(PAYLOAD)
KEYS = [key_of(number) for number in range(4)]
EMPTY = 0xEE


class Node:
    """Holds blocks 0 to 3 in records of an arena, and gives out the records behind as slots."""

    def __init__(self):
        self.landing = 4
        self.valid = True
        self.outcome = "ok"
        self.tickets = {}
        self.committed = []

    def __call__(self, message):
        match message:
            case Fetch():
                wanted = min(len(message.keys) // 16, self.landing)
                first = KEYS.index(message.keys[:16])
                places = [(first + i) * RECORD for i in range(wanted)]
                return Fetched(7 if places else 0, places, {}, self.outcome, "")
            case Release():
                return Released(self.valid)
            case Reserve():
                ticket = len(self.tickets) + 1
                count = len(message.keys) // 16
                self.tickets[ticket] = [(4 + ticket * 4 + i) * RECORD for i in range(count)]
                return Reserved(ticket, self.tickets[ticket], "ok")
            case Commit():
                self.committed.append(message.ticket)
                return Committed(len(self.tickets[message.ticket]))
            case _:
                return None


class Rig:
    def __init__(self, fakes):
        self.now = 0.0
        self.node = Node()
        self.client = fakes.Client(self.node, arena_bytes=32 * RECORD)
        for at, key in enumerate(KEYS):
            start = at * RECORD + HEADER_BYTES
            self.client.arena.view[start : start + PAYLOAD] = payload_of(key, PAYLOAD)
        self.link = fakes.Link(self.client)
        self.memory = np.full((LAYERS, COUNT, PAGE_BYTES), EMPTY, np.uint8)
        bases = tuple(self.memory[layer].ctypes.data for layer in range(LAYERS))
        self.pages = Pages(bases, PAGE_BYTES, PAGE_BYTES, COUNT, PER_BLOCK)
        device = HostDevice(self.pages, keep=self.memory)
        self.side = WorkerSide(self.link, device, 0, SETTING, now=lambda: self.now)

    def load(self, pages, first=0, keys=KEYS):
        """Run one load to its end; return the pages that failed."""
        work = StepWork([LoadTask("r", (b"".join(keys),), pages, first, 64)])
        self.side.begin(work)
        self.side.start_loads(work)
        for _ in range(10_000):
            self.side.save(work)
            if self.side.ended():
                return self.side.failed_pages()
        raise AssertionError("the load never ended")

    def saving(self, pages, keys=KEYS, tokens=64):
        save = SaveTask("r", (b"".join(keys),), (b"p" * 16,), (b"s" * 8,), 2, pages)
        work = StepWork(saves=[save], tokens=tokens)
        self.side.begin(work)
        return work

    def holds(self, pages, block, first=0):
        payload = np.frombuffer(payload_of(KEYS[block], PAYLOAD), np.uint8)
        parts = payload.reshape(LAYERS, PER_BLOCK, PAGE_BYTES)
        return all(
            (self.memory[:, page] == parts[:, first + at]).all() for at, page in enumerate(pages)
        )

    def empty(self, *pages):
        return (self.memory[:, list(pages)] == EMPTY).all()


@pytest.fixture
def rig(fakes):
    rig = Rig(fakes)
    yield rig
    rig.side.close()


def test_a_load_fills_its_pages_and_lets_go_of_the_lease(rig):
    assert rig.load([9, 3, 30, 1, 2, 0, 5, 6]) == set()
    for block, pages in enumerate([[9, 3], [30, 1], [2, 0], [5, 6]]):
        assert rig.holds(pages, block)
    assert rig.empty(4, 7, 8, 31)
    assert [message.lease for message in rig.client.of(Release)] == [7]
    assert rig.side.counts.data["calls/fetch/ok"] == 1
    assert rig.side.counts.data["fetched_bytes"] == 4 * PAYLOAD


def test_the_lease_may_be_confirmed_within_what_is_left_of_the_deadline(rig, monkeypatch):
    waits = {}
    wait = rig.client.wait

    def waiting(request_id, timeout_s):
        waits[type(rig.client.sent[request_id - 1])] = timeout_s
        return wait(request_id, timeout_s)

    monkeypatch.setattr(rig.client, "wait", waiting)
    monkeypatch.setattr(rig.side, "_deadline_max_s", 1000.0)
    assert rig.load([9, 3, 30, 1, 2, 0, 5, 6]) == set()
    assert 100 < waits[Release] <= 1000 < waits[Fetch]


def test_a_load_that_starts_inside_a_block_leaves_the_pages_before_alone(rig):
    assert rig.load([9, 3, 30], first=1, keys=KEYS[1:3]) == set()
    assert rig.holds([9], 1, first=1)
    assert rig.holds([3, 30], 2)


def test_a_load_that_ends_inside_a_block_takes_only_its_pages(rig):
    assert rig.load([9, 3, 30], keys=KEYS[:2]) == set()
    assert rig.holds([9, 3], 0)
    assert rig.holds([30], 1)


@pytest.mark.parametrize("outcome", ["late", "corrupt", "miss"])
def test_pages_of_blocks_that_did_not_land_are_reported(rig, outcome):
    rig.node.landing, rig.node.outcome = 1, outcome
    assert rig.load([9, 3, 30, 1, 2, 0, 5, 6]) == {30, 1, 2, 0, 5, 6}
    assert rig.holds([9, 3], 0)
    assert rig.empty(30, 1, 2, 0, 5, 6)
    assert rig.side.counts.data[f"calls/fetch/{outcome}"] == 1
    assert rig.side.failed_pages() == set()


def test_what_was_copied_after_the_lease_ended_does_not_count(rig):
    rig.node.valid = False
    assert rig.load([9, 3, 30, 1]) == {9, 3, 30, 1}


def test_nothing_landed_is_no_lease_to_release(rig):
    rig.node.landing = 0
    assert rig.load([9, 3]) == {9, 3}
    assert rig.client.of(Release) == []


def test_without_a_node_every_page_is_reported(rig):
    rig.link.lent = None
    assert rig.load([9, 3]) == {9, 3}
    assert rig.side.counts.data["calls/fetch/gone"] == 1


@pytest.mark.parametrize("dies_at", [Fetch, Release])
@pytest.mark.parametrize("failure", [NodeGoneError("gone"), RefusedError("no"), None])
def test_a_node_that_dies_during_a_load_costs_the_load_only(rig, dies_at, failure):
    rig.client.answer = lambda message: (
        failure if isinstance(message, dies_at) else rig.node(message)
    )
    assert rig.load([9, 3, 30, 1]) == {9, 3, 30, 1}
    rig.client.answer, rig.client.gone = rig.node, False
    assert rig.load([9, 3, 30, 1], keys=KEYS[2:]) == set()
    assert rig.holds([9, 3], 2)


def test_a_place_outside_the_arena_is_not_read(rig):
    rig.client.answer = lambda message: (
        Fetched(7, [32 * RECORD], {}, "ok", "") if isinstance(message, Fetch) else rig.node(message)
    )
    assert rig.load([9, 3], keys=KEYS[:1]) == {9, 3}
    assert rig.empty(9, 3)
    assert rig.side.counts.data["calls/fetch/corrupt"] == 1


def out_of_memory(*_):
    raise RuntimeError("CUDA out of memory")


def test_a_device_that_fails_costs_the_load_and_the_next_one_lands(rig, monkeypatch):
    scatter = rig.side._device.scatter
    monkeypatch.setattr(rig.side._device, "scatter", out_of_memory)
    assert rig.load([9, 3]) == {9, 3}
    assert [message.lease for message in rig.client.of(Release)] == [7]
    monkeypatch.setattr(rig.side._device, "scatter", scatter)
    assert rig.load([9, 3], keys=KEYS[:1]) == set()
    assert rig.holds([9, 3], 0)


def test_a_device_that_fails_costs_the_save_only_and_its_slots_go_back(rig, monkeypatch):
    monkeypatch.setattr(rig.side._device, "gather", out_of_memory)
    for _ in range(3):
        rig.side.save(rig.saving([9, 3], KEYS[:1]))
    assert rig.side.counts.data["calls/save/failed"] == 3
    assert [message.ticket for message in rig.client.of(Abort)] == [1, 2, 3]
    rig.side.begin(StepWork())
    assert rig.node.committed == []


def test_a_node_that_gives_more_slots_than_asked_for_costs_the_save_only(rig):
    rig.client.answer = lambda message: (
        Reserved(1, [9 * RECORD, 10 * RECORD], "ok") if isinstance(message, Reserve) else None
    )
    rig.side.save(rig.saving([9, 3], KEYS[:1]))
    assert rig.side.counts.data["calls/save/failed"] == 1
    assert [message.ticket for message in rig.client.of(Abort)] == [1]


def test_slots_of_a_step_go_back_where_a_node_talks_nonsense_half_way(rig):
    rig.client.answer = lambda message: (
        Released(True) if message == rig.client.of(Reserve)[1] else rig.node(message)
    )
    save = SaveTask("r", (KEYS[0],), (b"p" * 16,), (b"s" * 8,), 2, [9, 3])
    work = StepWork(saves=[save._replace(depth=depth) for depth in range(3)], tokens=64)
    rig.side.begin(work)
    rig.side.save(work)
    assert rig.side.counts.data == {"calls/save/gone": 3}
    assert [message.ticket for message in rig.client.of(Abort)] == [1]
    assert rig.client.of(Reserve)[2] in rig.client.forgotten


def test_where_threads_may_not_choose_their_cores_blocks_are_loaded_all_the_same(
    fakes, monkeypatch
):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    rig = Rig(fakes)
    assert rig.load([9, 3], keys=KEYS[:1]) == set()
    rig.side.close()


def test_a_step_without_a_forward_leaves_the_interpreter_to_the_load(rig):
    let_go = threading.Event()
    rig.client.answer = lambda message: let_go.wait(20) and rig.node(message)
    work = StepWork([LoadTask("r", (KEYS[0],), [9, 3], 0, 64)])
    rig.side.start_loads(work)
    assert rig.side.ended() == set()
    rig.side.save(work)
    assert rig.side.ended() == set()
    let_go.set()
    while not (ended := rig.side.ended()):
        rig.side.save(StepWork())
    assert ended == {"r"}


def fill(rig, pages):
    for at, page in enumerate(pages):
        block, within = divmod(at, PER_BLOCK)
        payload = np.frombuffer(payload_of(KEYS[block], PAYLOAD), np.uint8)
        rig.memory[:, page] = payload.reshape(LAYERS, PER_BLOCK, PAGE_BYTES)[:, within]


def slot(rig, place):
    start = place + HEADER_BYTES
    return bytes(rig.client.arena.view[start : start + PAYLOAD])


def test_saved_pages_lie_in_their_slots_when_the_step_ends(rig):
    work = rig.saving([9, 3, 30, 1], KEYS[:2])
    (reserve,) = rig.client.of(Reserve)
    assert (reserve.parent, reserve.depth, reserve.segment) == (b"p" * 16, 2, b"s" * 8)
    fill(rig, [9, 3, 30, 1])
    rig.side.save(work)
    rig.memory[:] = EMPTY  # the next step may overwrite them
    for place, key in zip(rig.node.tickets[1], KEYS[:2], strict=True):
        assert slot(rig, place) == bytes(payload_of(key, PAYLOAD))
    assert rig.node.committed == []
    rig.side.begin(StepWork())
    assert rig.node.committed == [1]
    assert rig.side.counts.data["saved_blocks"] == 2


def test_blocks_the_node_has_or_has_no_room_for_are_not_copied(rig):
    rig.client.answer = lambda message: (
        Reserved(1, [-1, 9 * RECORD, -1], "full") if isinstance(message, Reserve) else Committed(1)
    )
    fill(rig, [9, 3, 30, 1, 2, 0])
    rig.side.save(rig.saving([9, 3, 30, 1, 2, 0], KEYS[:3]))
    assert slot(rig, 9 * RECORD) == bytes(payload_of(KEYS[1], PAYLOAD))
    assert rig.side.counts.data["calls/save/full"] == 1


def test_a_node_without_slots_in_time_costs_the_save_only(rig):
    rig.client.answer = lambda _: None
    work = rig.saving([9, 3], KEYS[:1])
    clock = iter(range(100))
    rig.side._running = lambda: next(clock)
    rig.side.save(work)
    assert rig.side._backoff.timeout_s(1.0) == 0.5
    assert rig.client.forgotten == rig.client.of(Reserve)
    assert rig.side.counts.data["calls/save/late"] == 1


def test_a_refusal_costs_the_save_only(rig):
    rig.client.answer = lambda _: RefusedError("no such parent")
    rig.side.save(rig.saving([9, 3], KEYS[:1]))
    assert rig.side.counts.data["calls/save/refused"] == 1


@pytest.mark.parametrize("when", ["before", "reserving", "committing"])
def test_a_node_that_dies_costs_the_save_only(rig, when):
    if when == "before":
        rig.link.lent = None
    work = rig.saving([9, 3], KEYS[:1])
    rig.client.gone = when == "reserving"
    rig.side.save(work)
    rig.client.gone = when != "before"
    rig.side.begin(StepWork())
    rig.side.begin(StepWork())
    assert rig.side.counts.data == {"calls/save/gone": 1}


def test_slots_asked_for_long_ago_are_asked_for_again(rig):
    work = rig.saving([9, 3], KEYS[:1])
    rig.now = RECLAIM_S
    fill(rig, [9, 3])
    rig.side.save(work)
    assert len(rig.client.of(Reserve)) == 2
    assert rig.client.forgotten == rig.client.of(Reserve)[:1]
    (place,) = rig.node.tickets[1]
    assert slot(rig, place) == bytes(payload_of(KEYS[0], PAYLOAD))


def test_pages_that_could_not_be_copied_are_not_published(rig, monkeypatch):
    work = rig.saving([9, 3], KEYS[:1])
    monkeypatch.setattr(rig.side._device, "_copy", lambda _plan: False)
    rig.side.save(work)
    rig.side.begin(StepWork())
    assert rig.node.committed == []
    assert [message.ticket for message in rig.client.of(Abort)] == [1]


class Deferred:
    """A device whose copies arrive when they are let, or waited for."""

    arrives = False

    def __init__(self, device):
        self._device, self.pages, self.close = device, device.pages, device.close

    def gather(self, *plan):
        self._plan = plan
        return self

    def done(self):
        return self.arrives

    def wait(self):
        self.arrives = True
        return self._device.gather(*self._plan).wait()


def test_blocks_that_arrive_while_the_engine_computes_nothing_are_published(rig):
    device = rig.side._device = Deferred(rig.side._device)
    work, heard = rig.saving([9, 3], KEYS[:1]), []
    rig.side.save(work)
    assert rig.side.report(work) == WorkerReport(computed=True, moving=True)
    for arrives in (False, True, True):
        rig.side.begin(StepWork())
        device.arrives = arrives
        rig.side.save(StepWork())
        heard.append((rig.side.report(StepWork()), len(rig.client.of(Commit))))
    assert heard == [(WorkerReport(moving=True), 0), (WorkerReport(), 1), (None, 1)]


def test_what_is_on_its_way_at_the_end_is_published_before_the_session_is_over(rig):
    rig.side._device, at_close = Deferred(rig.side._device), []
    fill(rig, [9, 3])
    rig.side.save(rig.saving([9, 3], KEYS[:1]))
    (place,) = rig.node.tickets[1]
    rig.link.close = lambda: at_close.append((list(rig.node.committed), slot(rig, place)))
    rig.side.close()
    assert at_close == [([1], bytes(payload_of(KEYS[0], PAYLOAD)))]


def test_a_load_has_the_deadline_of_its_plan_within_what_was_configured(rig):
    for planned, sent in ((0.0, 5.0), (2.0, 2.0), (0.001, 0.01), (50.0, 5.0)):
        load = LoadTask("r", (KEYS[0],), [9, 3], 0, 100, plan=7, deadline_s=planned)
        rig.side.start_loads(StepWork([load]))
        while not rig.side.ended():
            rig.side.save(StepWork())
        assert rig.client.of(Fetch)[-1].deadline_s == sent
        assert rig.client.of(Fetch)[-1].plan == 7
