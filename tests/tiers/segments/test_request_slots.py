"""Requests to a medium: reads go before writes, whatever the writes do."""

import threading
from contextlib import ExitStack, closing

import pytest

from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.request_slots import RequestSlots
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter
from holdfast.wire.remote.stream import Deadline

WITHIN_S = 60.0


def at_once():
    """A deadline of a request that waits for nothing."""
    return Deadline.within(0.0)


def is_write_admitted(slots):
    with slots.write(at_once()) as admitted:
        return admitted


def test_with_all_slots_full_of_writes_a_read_gets_one_at_once():
    slots = RequestSlots(reads=2, writes=4)
    with ExitStack() as held:
        assert all(held.enter_context(slots.write(at_once())) for _ in range(4))
        assert not is_write_admitted(slots)
        assert [held.enter_context(slots.read(at_once())) for _ in range(3)] == [True, True, False]
    with ExitStack() as held:  # all slots are free again
        assert all(held.enter_context(slots.write(at_once())) for _ in range(4))
        assert all(held.enter_context(slots.read(at_once())) for _ in range(2))


@pytest.fixture
def waiting_read():
    """Return slots whose only read slot is taken, events that end it, and a read that waits."""
    slots, ends, admitted = RequestSlots(reads=1, writes=4), threading.Event(), []

    def first():
        with slots.read(Deadline.within(WITHIN_S)):
            began.set()
            assert ends.wait(WITHIN_S)

    def second():
        with slots.read(deadline) as is_admitted:
            admitted.append(is_admitted)

    began, deadline = threading.Event(), Deadline.within(WITHIN_S)
    threads = [threading.Thread(target=each) for each in (first, second)]
    threads[0].start()
    assert began.wait(WITHIN_S)
    try:
        assert is_write_admitted(slots), "no read waits"
        threads[1].start()
        while is_write_admitted(slots):
            assert not deadline.over, "writes begin although a read waits"
        yield slots, ends, admitted
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_a_write_begins_only_when_no_read_waits(waiting_read):
    slots, ends, admitted = waiting_read
    before = slots.waits
    assert not is_write_admitted(slots)
    assert slots.waits == before + 1
    ends.set()
    with slots.write(Deadline.within(WITHIN_S)) as is_admitted:
        assert is_admitted
    assert admitted == [True]


def test_a_read_that_gives_up_waiting_holds_up_no_write():
    slots = RequestSlots(reads=1, writes=1)
    with slots.read(at_once()) as first, slots.read(at_once()) as second:
        assert (first, second) == (True, False)
        assert is_write_admitted(slots)


def test_a_tier_serves_loads_while_every_put_hangs():
    objects, putting, goes_on = MemoryObjects(), threading.Semaphore(0), threading.Event()

    def hang(verb, name):
        if verb == "put" and not name.startswith("index/"):
            putting.release()
            assert goes_on.wait(WITHIN_S)
        return Outcome.OK

    saved = ChainedBlocks(65_000)
    others = [ChainedBlocks(65_000, namespace_seed=seed) for seed in range(6)]
    limits = SegmentTierLimits(read_s=WITHIN_S, write_s=WITHIN_S, ask_s=WITHIN_S, writes=2)
    outcomes = []
    with closing(
        SegmentTier(MemoryMedium(objects), SegmentWriter("7d"), limits, "segments")
    ) as tier:
        assert saved.save(tier, range(4)) == [Outcome.OK] * 4
        objects.fault = hang
        threads = [
            threading.Thread(target=lambda each=each: outcomes.extend(each.save(tier, [0])))
            for each in others
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in range(limits.writes):
                assert putting.acquire(timeout=WITHIN_S)
            assert saved.load(tier, range(4)) == [Outcome.OK] * 4
            assert not putting.acquire(blocking=False), "more puts at a time than permitted"
            assert not outcomes
        finally:
            goes_on.set()
            for thread in threads:
                thread.join()
    assert outcomes == [Outcome.OK] * len(others)
