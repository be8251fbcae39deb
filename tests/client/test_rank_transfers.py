import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.blocks.envelope import HEADER_BYTES, stored_bytes
from holdfast.client import rank_transfers
from holdfast.client.loader import RunningLoad
from holdfast.client.rank_transfers import RankTransfers, StepReport, TransferOptions
from holdfast.client.tasks import GroupTask, LoadTask, SaveTask
from holdfast.devices.base import Pages
from holdfast.devices.host import HostDevice
from holdfast.errors import NodeGoneError, RefusedError
from holdfast.limits import RECLAIM_S
from holdfast.testing.payloads import key_of, payload_of
from holdfast.testing.played_client import PlayedClient, PlayedConnection
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
EMPTY = 0xEE


def step(loads=(), saves=(), tokens=0):
    """What a rank has to do in one step."""
    return SimpleNamespace(loads=list(loads), saves=list(saves), tokens=tokens)


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
                sources = {"disk": len(places)}
                return Fetched(7 if places else 0, places, sources, self.outcome, "")
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


class Harness:
    def __init__(self, options=OPTIONS):
        self.now = 0.0
        self.node = Node()
        self.client = PlayedClient(self.node, arena_bytes=32 * RECORD)
        for at, key in enumerate(KEYS):
            start = at * RECORD + HEADER_BYTES
            self.client.arena.view[start : start + PAYLOAD] = payload_of(key, PAYLOAD)
        self.link = PlayedConnection(self.client)
        self.memory = np.full((LAYERS, COUNT, PAGE_BYTES), EMPTY, np.uint8)
        bases = tuple(self.memory[layer].ctypes.data for layer in range(LAYERS))
        self.pages = Pages.uniform(bases, PAGE_BYTES, PAGE_BYTES, COUNT, PER_BLOCK)
        self.device = HostDevice(self.pages, keep=self.memory)
        self.side = RankTransfers(self.link, [self.device], options, now=lambda: self.now)

    def load(self, pages, first=0, keys=KEYS):
        """Run one load to its end; return the pages that failed."""
        work = step([LoadTask("r", (GroupTask((b"".join(keys),), pages, first),), 64)])
        self.side.begin(work)
        self.side.start_loads(work)
        for _ in range(10_000):
            self.side.save(work)
            if self.side.ended():
                return self.side.failed_pages()
        raise AssertionError("the load never ended")

    def saving(self, pages, keys=KEYS, tokens=64):
        save = SaveTask("r", (b"".join(keys),), (b"p" * 16,), (b"s" * 8,), 2, pages)
        work = step(saves=[save], tokens=tokens)
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
def harness():
    harness = Harness()
    yield harness
    harness.side.close()


def test_a_load_fills_its_pages_and_releases_the_lease(harness):
    assert harness.load([9, 3, 30, 1, 2, 0, 5, 6]) == set()
    for block, pages in enumerate([[9, 3], [30, 1], [2, 0], [5, 6]]):
        assert harness.holds(pages, block)
    assert harness.empty(4, 7, 8, 31)
    assert [message.lease for message in harness.client.of(Release)] == [7]
    assert harness.side.counts.data["calls/fetch/ok"] == 1
    assert harness.side.counts.data["fetched_bytes"] == 4 * PAYLOAD


def test_a_release_waits_at_most_for_the_rest_of_the_deadline(monkeypatch):
    waits, harness = {}, Harness(TransferOptions(1000.0))
    wait = harness.client.wait

    def waiting(request_id, timeout_s):
        waits[type(harness.client.sent[request_id - 1])] = timeout_s
        return wait(request_id, timeout_s)

    monkeypatch.setattr(harness.client, "wait", waiting)
    assert harness.load([9, 3, 30, 1, 2, 0, 5, 6]) == set()
    assert 100 < waits[Release] <= 1000 < waits[Fetch]
    harness.side.close()


def test_a_short_load_does_not_wait_behind_a_long_one(harness, monkeypatch):
    long_may_end, wait = threading.Event(), harness.client.wait

    def waiting(request_id, timeout_s):
        message = harness.client.sent[request_id - 1]
        if isinstance(message, Fetch) and len(message.keys) == 16 * len(KEYS):
            long_may_end.wait(60)
        return wait(request_id, timeout_s)

    monkeypatch.setattr(harness.client, "wait", waiting)
    long = LoadTask("long", (GroupTask((b"".join(KEYS),), [9, 3, 30, 1, 2, 0, 5, 6], 0),), 64)
    short = LoadTask("short", (GroupTask((KEYS[0],), [10, 11], 0),), 16)
    harness.side.start_loads(step([long, short]))
    ended = []
    for expected in ("short", "long"):
        while len(ended) == (expected == "long"):
            harness.side.save(step())
            ended += harness.side.ended()
        assert ended[-1] == expected
        long_may_end.set()
    assert harness.holds([10, 11], 0)
    assert harness.holds([9, 3], 0)


def test_a_load_that_ends_while_others_are_taken_is_reported_by_the_next_call(harness, monkeypatch):
    loads = [
        LoadTask(name, (GroupTask((KEYS[at],), [2 * at, 2 * at + 1], 0),), 64)
        for at, name in enumerate(("first", "second"))
    ]
    polled = []

    def late(running):
        """As if the second load had ended just after it was looked at."""
        polled.append(running)
        return None if polled.count(running) == 1 and len(set(polled)) > 1 else running.wait(60.0)

    harness.side.start_loads(step(loads))
    monkeypatch.setattr(RunningLoad, "poll", late)
    assert harness.side.ended() == {"first"}
    monkeypatch.setattr(RunningLoad, "poll", lambda running: running.wait(60.0))
    assert harness.side.ended() == {"second"}


def test_a_load_reports_its_loaded_blocks_by_tier(harness):
    harness.node.landing = 1
    assert harness.load([9, 8, 7, 6]) == {6, 7}
    assert harness.side.report(step()) == StepReport(landed={"r": {"disk": 1}})
    assert harness.side.report(step()) is None
    harness.node.valid = False
    harness.load([9, 8, 7, 6])
    assert harness.side.report(step()).landed == {"r": {}}


@pytest.mark.parametrize(("refused", "outcome"), [(False, "gone"), (True, "refused")])
def test_loads_and_saves_without_a_session_count_the_reason(harness, refused, outcome):
    harness.link.current, harness.link.refused = None, refused
    assert harness.load([9, 8, 7, 6]) == {6, 7, 8, 9}
    harness.side.save(harness.saving([1, 2]))
    assert harness.side.report(step()).landed == {"r": {}}
    counts = harness.side.counts.data
    assert counts == {f"calls/fetch/{outcome}": 1, f"calls/save/{outcome}": 1}


def test_a_load_that_starts_inside_a_block_leaves_the_pages_before_alone(harness):
    assert harness.load([9, 3, 30], first=1, keys=KEYS[1:3]) == set()
    assert harness.holds([9], 1, first=1)
    assert harness.holds([3, 30], 2)


def test_a_load_that_ends_inside_a_block_takes_only_its_pages(harness):
    assert harness.load([9, 3, 30], keys=KEYS[:2]) == set()
    assert harness.holds([9, 3], 0)
    assert harness.holds([30], 1)


@pytest.mark.parametrize("outcome", ["late", "corrupt", "miss"])
def test_pages_of_blocks_that_did_not_land_are_reported(harness, outcome):
    harness.node.landing, harness.node.outcome = 1, outcome
    assert harness.load([9, 3, 30, 1, 2, 0, 5, 6]) == {30, 1, 2, 0, 5, 6}
    assert harness.holds([9, 3], 0)
    assert harness.empty(30, 1, 2, 0, 5, 6)
    assert harness.side.counts.data[f"calls/fetch/{outcome}"] == 1
    assert harness.side.failed_pages() == set()


def test_pages_copied_after_the_lease_ended_are_reported_as_failed(harness):
    harness.node.valid = False
    assert harness.load([9, 3, 30, 1]) == {9, 3, 30, 1}


def test_a_fetch_without_blocks_releases_no_lease(harness):
    harness.node.landing = 0
    assert harness.load([9, 3]) == {9, 3}
    assert harness.client.of(Release) == []


def test_every_page_of_a_load_without_a_node_is_reported_as_failed(harness):
    harness.link.current = None
    assert harness.load([9, 3]) == {9, 3}
    assert harness.side.counts.data["calls/fetch/gone"] == 1


@pytest.mark.parametrize("dies_at", [Fetch, Release])
@pytest.mark.parametrize("failure", [NodeGoneError("gone"), RefusedError("no"), None])
def test_a_node_that_dies_during_a_load_costs_the_load_only(harness, dies_at, failure):
    harness.client.answer = lambda message: (
        failure if isinstance(message, dies_at) else harness.node(message)
    )
    assert harness.load([9, 3, 30, 1]) == {9, 3, 30, 1}
    harness.client.answer, harness.client.gone = harness.node, False
    assert harness.load([9, 3, 30, 1], keys=KEYS[2:]) == set()
    assert harness.holds([9, 3], 2)


def test_a_place_outside_the_arena_is_not_read(harness):
    harness.client.answer = lambda message: (
        Fetched(7, [32 * RECORD], {}, "ok", "")
        if isinstance(message, Fetch)
        else harness.node(message)
    )
    assert harness.load([9, 3], keys=KEYS[:1]) == {9, 3}
    assert harness.empty(9, 3)
    assert harness.side.counts.data["calls/fetch/corrupt"] == 1


def out_of_memory(*_):
    raise RuntimeError("CUDA out of memory")


def test_a_device_that_fails_costs_the_load_and_the_next_one_lands(harness, monkeypatch):
    scatter = harness.device.scatter
    monkeypatch.setattr(harness.device, "scatter", out_of_memory)
    assert harness.load([9, 3]) == {9, 3}
    assert [message.lease for message in harness.client.of(Release)] == [7]
    monkeypatch.setattr(harness.device, "scatter", scatter)
    assert harness.load([9, 3], keys=KEYS[:1]) == set()
    assert harness.holds([9, 3], 0)


def test_a_device_that_fails_costs_the_save_only_and_its_slots_go_back(harness, monkeypatch):
    monkeypatch.setattr(harness.device, "gather", out_of_memory)
    for _ in range(3):
        harness.side.save(harness.saving([9, 3], KEYS[:1]))
    assert harness.side.counts.data["calls/save/failed"] == 3
    assert [message.ticket for message in harness.client.of(Abort)] == [1, 2, 3]
    harness.side.begin(step())
    assert harness.node.committed == []


def test_a_node_that_gives_more_slots_than_asked_for_costs_the_save_only(harness):
    harness.client.answer = lambda message: (
        Reserved(1, [9 * RECORD, 10 * RECORD], "ok") if isinstance(message, Reserve) else None
    )
    harness.side.save(harness.saving([9, 3], KEYS[:1]))
    assert harness.side.counts.data["calls/save/failed"] == 1
    assert [message.ticket for message in harness.client.of(Abort)] == [1]


def test_an_invalid_answer_to_a_reservation_returns_all_slots_of_the_step(harness):
    harness.client.answer = lambda message: (
        Released(True) if message == harness.client.of(Reserve)[1] else harness.node(message)
    )
    save = SaveTask("r", (KEYS[0],), (b"p" * 16,), (b"s" * 8,), 2, [9, 3])
    work = step(saves=[save._replace(depth=depth) for depth in range(3)], tokens=64)
    harness.side.begin(work)
    harness.side.save(work)
    assert harness.side.counts.data == {"calls/save/gone": 3}
    assert [message.ticket for message in harness.client.of(Abort)] == [1]
    assert harness.client.of(Reserve)[2] in harness.client.forgotten


def test_blocks_are_loaded_if_setting_the_cpu_affinity_is_refused(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    harness = Harness()
    assert harness.load([9, 3], keys=KEYS[:1]) == set()
    harness.side.close()


def test_a_step_without_a_forward_yields_the_gil_to_a_running_load(harness):
    let_go = threading.Event()
    harness.client.answer = lambda message: let_go.wait(60) and harness.node(message)
    work = step([LoadTask("r", (GroupTask((KEYS[0],), [9, 3], 0),), 64)])
    harness.side.start_loads(work)
    assert harness.side.ended() == set()
    harness.side.save(work)
    assert harness.side.ended() == set()
    let_go.set()
    while not (ended := harness.side.ended()):
        harness.side.save(step())
    assert ended == {"r"}


def fill(harness, pages):
    for at, page in enumerate(pages):
        block, within = divmod(at, PER_BLOCK)
        payload = np.frombuffer(payload_of(KEYS[block], PAYLOAD), np.uint8)
        harness.memory[:, page] = payload.reshape(LAYERS, PER_BLOCK, PAGE_BYTES)[:, within]


def slot(harness, place):
    start = place + HEADER_BYTES
    return bytes(harness.client.arena.view[start : start + PAYLOAD])


@pytest.mark.parametrize("tokens", [64, 0], ids=["with a forward", "without one"])
def test_saved_pages_lie_in_their_slots_when_the_step_ends(harness, tokens):
    work = harness.saving([9, 3, 30, 1], KEYS[:2], tokens=tokens)
    (reserve,) = harness.client.of(Reserve)
    assert (reserve.parent, reserve.depth, reserve.segment) == (b"p" * 16, 2, b"s" * 8)
    fill(harness, [9, 3, 30, 1])
    harness.side.save(work)
    harness.memory[:] = EMPTY  # the next step may overwrite them
    for place, key in zip(harness.node.tickets[1], KEYS[:2], strict=True):
        assert slot(harness, place) == bytes(payload_of(key, PAYLOAD))
    assert harness.node.committed == []
    harness.side.begin(step())
    assert harness.node.committed == [1]
    assert harness.side.counts.data["saved_blocks"] == 2


def test_blocks_that_get_no_slot_are_not_copied(harness):
    harness.client.answer = lambda message: (
        Reserved(1, [-1, 9 * RECORD, -1], "full") if isinstance(message, Reserve) else Committed(1)
    )
    fill(harness, [9, 3, 30, 1, 2, 0])
    harness.side.save(harness.saving([9, 3, 30, 1, 2, 0], KEYS[:3]))
    assert slot(harness, 9 * RECORD) == bytes(payload_of(KEYS[1], PAYLOAD))
    assert harness.side.counts.data["calls/save/full"] == 1


def test_a_late_reservation_fails_only_the_save(harness):
    harness.client.answer = lambda _: None
    work = harness.saving([9, 3], KEYS[:1])
    clock = iter(range(100))
    harness.side._saves._running = lambda: next(clock)
    harness.side.save(work)
    assert harness.side._saves._backoff.timeout_s(1.0) == 0.5
    assert harness.client.forgotten == harness.client.of(Reserve)
    assert harness.side.counts.data["calls/save/late"] == 1


def test_a_refusal_costs_the_save_only(harness):
    harness.client.answer = lambda _: RefusedError("no such parent")
    harness.side.save(harness.saving([9, 3], KEYS[:1]))
    assert harness.side.counts.data["calls/save/refused"] == 1


def test_a_refused_commit_is_counted_and_its_reason_is_logged(harness, caplog):
    answer = harness.client.answer
    harness.client.answer = lambda message: (
        RefusedError("the domain was erased") if isinstance(message, Commit) else answer(message)
    )
    harness.side.save(harness.saving([9, 3], KEYS[:1]))
    harness.side.begin(step())
    assert harness.side.counts.data == {"calls/save/refused": 1}
    assert "blocks not saved: the domain was erased" in caplog.text


@pytest.mark.parametrize("when", ["before", "reserving", "committing"])
def test_a_node_that_dies_costs_the_save_only(harness, when):
    if when == "before":
        harness.link.current = None
    work = harness.saving([9, 3], KEYS[:1])
    harness.client.gone = when == "reserving"
    harness.side.save(work)
    harness.client.gone = when != "before"
    harness.side.begin(step())
    harness.side.begin(step())
    assert harness.side.counts.data == {"calls/save/gone": 1}


def test_slots_reserved_too_long_ago_are_reserved_again(harness):
    work = harness.saving([9, 3], KEYS[:1])
    harness.now = RECLAIM_S
    fill(harness, [9, 3])
    harness.side.save(work)
    assert len(harness.client.of(Reserve)) == 2
    assert harness.client.forgotten == harness.client.of(Reserve)[:1]
    (place,) = harness.node.tickets[1]
    assert slot(harness, place) == bytes(payload_of(KEYS[0], PAYLOAD))


def test_pages_that_could_not_be_copied_are_not_published(harness, monkeypatch):
    work = harness.saving([9, 3], KEYS[:1])
    monkeypatch.setattr("holdfast.devices.host._copy_batched", lambda _plan: False)
    harness.side.save(work)
    harness.side.begin(step())
    assert harness.node.committed == []
    assert [message.ticket for message in harness.client.of(Abort)] == [1]
    assert harness.side.counts.data["calls/save/failed"] == 1


class DeferredGather:
    """A copy out of pages that arrives when it is let, or waited for."""

    arrives = False

    def __init__(self, gather):
        self._gather = gather

    def __call__(self, *plan):
        self._plan = plan
        return self

    def done(self):
        return self.arrives

    def result(self):
        self.arrives = True
        return self._gather(*self._plan).result()


def test_copies_that_complete_while_the_engine_is_idle_are_committed(harness, monkeypatch):
    device = DeferredGather(harness.device.gather)
    monkeypatch.setattr(harness.device, "gather", device)
    work, heard = harness.saving([9, 3], KEYS[:1]), []
    harness.side.save(work)
    assert harness.side.report(work) == StepReport(computed=True, moving=True)
    for arrives in (False, True, True):
        harness.side.begin(step())
        device.arrives = arrives
        harness.side.save(step())
        heard.append((harness.side.report(step()), len(harness.client.of(Commit))))
    assert heard == [(StepReport(moving=True), 0), (StepReport(), 1), (None, 1)]


def test_copies_in_flight_at_close_are_committed_before_the_session_ends(harness, monkeypatch):
    monkeypatch.setattr(harness.device, "gather", DeferredGather(harness.device.gather))
    at_close = []
    fill(harness, [9, 3])
    harness.side.save(harness.saving([9, 3], KEYS[:1]))
    (place,) = harness.node.tickets[1]
    harness.link.close = lambda: at_close.append(
        (list(harness.node.committed), slot(harness, place))
    )
    harness.side.close()
    assert at_close == [([1], bytes(payload_of(KEYS[0], PAYLOAD)))]


def test_before_pages_lose_their_memory_every_copy_has_ended(harness, monkeypatch):
    class Slow(DeferredGather):
        asked = 0

        def done(self):
            self.asked += 1
            return self.asked > 3

    monkeypatch.setattr(harness.device, "gather", Slow(harness.device.gather))
    fill(harness, [9, 3])
    harness.side.save(harness.saving([9, 3], KEYS[:1]))
    load = LoadTask("r", (GroupTask((b"".join(KEYS[:2]),), [1, 2, 5, 6], 0),), 64)
    harness.side.start_loads(step([load]))
    assert harness.side.finish_copies()
    assert len(harness.client.of(Commit)) == 1
    assert harness.holds([1, 2], 0)
    assert harness.holds([5, 6], 1)
    assert harness.side.ended() == {"r"}


def test_a_copy_that_does_not_end_is_waited_for_within_a_limit(harness, monkeypatch):
    monkeypatch.setattr(rank_transfers, "FINISH_S", 0.05)
    monkeypatch.setattr(harness.device, "gather", DeferredGather(harness.device.gather))
    harness.side.save(harness.saving([9, 3], KEYS[:1]))
    assert not harness.side.finish_copies()


def test_loads_of_an_earlier_model_fail_whether_they_are_under_way_or_not(harness, monkeypatch):
    may_end, wait = threading.Event(), harness.client.wait

    def waiting(request_id, timeout_s):
        if isinstance(harness.client.sent[request_id - 1], Fetch):
            may_end.wait(60)
        return wait(request_id, timeout_s)

    monkeypatch.setattr(harness.client, "wait", waiting)
    harness.side.start_loads(step([LoadTask("old", (GroupTask((KEYS[0],), [9, 3], 0),), 32)]))
    harness.side.refuse_loads(step([LoadTask("new", (GroupTask((KEYS[1],), [5, 6], 0),), 32)]))
    assert harness.side.ended() == {"new"}
    assert harness.side.failed_pages() == {5, 6}
    may_end.set()
    ended = set()
    while not ended:
        harness.side.save(step())
        ended = harness.side.ended()
    assert ended == {"old"}
    assert harness.side.failed_pages() == {9, 3}
    assert harness.side.failed_requests() == {"new", "old"}
    assert harness.empty(5, 6)
    assert harness.load([9, 3], keys=KEYS[:1]) == set(), "later loads are not refused"


def given_up(harness):
    """Return the keys of reservations that went back to the node unused."""
    return [each.keys for each in harness.client.forgotten if isinstance(each, Reserve)]


def test_blocks_of_a_step_that_failed_are_not_saved_with_the_pages_of_a_later_one(harness):
    harness.saving([9, 3], KEYS[:1])  # its forward fails, so it is not copied
    fill(harness, [9, 3])
    harness.side.save(harness.saving([5, 6], KEYS[1:2]))
    assert given_up(harness) == [KEYS[0]]
    (commit,) = harness.client.of(Commit)
    (place,) = harness.node.tickets[commit.ticket]
    assert slot(harness, place) == harness.memory[:, [5, 6]].tobytes()


def test_saves_of_a_failed_step_are_given_up(harness):
    harness.saving([9, 3], KEYS[:1])
    harness.side.abandon_saves()
    harness.side.save(step(tokens=64))
    assert not harness.client.of(Commit)
    assert given_up(harness) == [KEYS[0]]


def test_saves_that_were_never_copied_do_not_delay_the_end_of_all_copies(harness, monkeypatch):
    monkeypatch.setattr(rank_transfers, "FINISH_S", 3600.0)
    harness.saving([9, 3], KEYS[:1])
    assert harness.side.finish_copies()
    assert given_up(harness) == [KEYS[0]]


def test_a_load_has_the_deadline_of_its_plan_within_what_was_configured(harness):
    for planned, sent in ((0.0, 5.0), (2.0, 2.0), (0.001, 0.01), (50.0, 5.0)):
        load = LoadTask("r", (GroupTask((KEYS[0],), [9, 3], 0),), 100, plan=7, deadline_s=planned)
        harness.side.start_loads(step([load]))
        while not harness.side.ended():
            harness.side.save(step())
        assert harness.client.of(Fetch)[-1].deadline_s == sent
        assert harness.client.of(Fetch)[-1].plan == 7
