"""An object that a medium refuses to delete keeps no other one, and its bytes count."""

import itertools
import time
from contextlib import closing

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.deletions import (
    DELETE_MAX,
    REFUSED_MAX,
    RETRY_S,
    TRIAL_MAX_S,
    DueDeletions,
)
from holdfast.tiers.segments.medium import MediumAnswer
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

WITHIN_S = 60.0
DAY_S = 86_400.0


class LockedMedium(MemoryMedium):
    """Refuses every deletion that names one of `locked`, as a bucket with locked objects."""

    def __init__(self, shared):
        super().__init__(shared)
        self.locked = set()

    def delete(self, names, deadline):
        if self.locked.intersection(names):
            return MediumAnswer(Outcome.GONE, why="AccessDenied")
        return super().delete(names, deadline)


@pytest.fixture
def objects():
    return MemoryObjects()


@pytest.fixture
def medium(objects):
    return LockedMedium(objects)


def open_tier(medium, now_s, capacity_bytes=0, poll_s=0.05, clock=None):
    limits = SegmentTierLimits(
        read_s=4 * poll_s, write_s=60.0, ask_s=60.0, poll_s=poll_s, capacity_bytes=capacity_bytes
    )
    writer = SegmentWriter("1d", clock, wall_s=lambda: now_s[0])
    return SegmentTier(medium, writer, limits, "segments")


def await_that(reached):
    end_s = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end_s, "not reached"
        time.sleep(0.02)


def segments(objects):
    return {name for name in objects.objects if not name.startswith("index/")}


def test_segments_leave_beside_one_that_cannot_be_deleted(objects, medium, caplog):
    blocks, now_s = ChainedBlocks(65_000), [time.time()]
    with closing(open_tier(medium, now_s)) as tier:
        for number in range(5):
            assert blocks.save(tier, [number]) == [Outcome.OK]
        locked = sorted(segments(objects))[2]
        medium.locked = {locked}
        now_s[0] += 1.1 * DAY_S
        await_that(lambda: segments(objects) == {locked})
        await_that(lambda: f"cannot be deleted, such as {locked}: AccessDenied" in caplog.text)


def test_bytes_that_cannot_be_deleted_count_towards_the_capacity(objects, medium):
    blocks, now_s = ChainedBlocks(65_000), [time.time()]
    size = blocks.namespace.slot_bytes + 4096
    with closing(open_tier(medium, now_s, int(3.5 * size))) as tier:
        assert blocks.save(tier, [0]) == [Outcome.OK]
        medium.locked = segments(objects)
        now_s[0] += 1.1 * DAY_S
        await_that(lambda: tier.usage().used_bytes == size and tier.usage().records == 0)
        for number in range(1, 6):
            await_that(lambda number=number: blocks.save(tier, [number]) == [Outcome.OK])
        await_that(lambda: sum(len(objects.objects[n]) for n in segments(objects)) <= 3.5 * size)
        assert medium.locked < segments(objects)


def test_refused_names_among_many_are_found_and_tried_again(objects, medium):
    clock, names = ManualClock(), [f"7d/00/{number:04x}" for number in range(DELETE_MAX)]
    objects.objects.update(dict.fromkeys(names, b"x"))
    medium.locked = {names[0], names[700], names[-1]}
    deletions = DueDeletions(medium, clock)
    for name in names:
        deletions.add(name, 1.0, nbytes=10)
    assert deletions.delete_due() == []
    clock.advance(2.0)
    assert sorted(deletions.delete_due()) == sorted(set(names) - medium.locked)
    assert set(objects.objects) == deletions.waiting() == medium.locked
    assert deletions.refused_bytes == 30
    before = len(objects.calls)
    assert deletions.delete_due() == []
    assert len(objects.calls) == before
    medium.locked = {names[0]}
    clock.advance(RETRY_S + 1.0)
    assert sorted(deletions.delete_due()) == [names[700], names[-1]]
    assert deletions.refused_bytes == 10


def test_names_are_deleted_though_more_than_one_batch_is_refused(objects, medium):
    clock, names = ManualClock(), [f"7d/00/{number:04x}" for number in range(DELETE_MAX + 50)]
    objects.objects.update(dict.fromkeys(names, b"x"))
    medium.locked = set(names[:DELETE_MAX])
    deletions = DueDeletions(medium, clock)
    for at, name in enumerate(names):
        deletions.add(name, 1.0 + at / 1e6)
    clock.advance(2.0)
    for _ in range(DELETE_MAX):
        if medium.locked == set(objects.objects):
            break
        deletions.delete_due()
    assert medium.locked == set(objects.objects)


def test_a_medium_that_refuses_all_deletions_keeps_most_segments_readable(objects, medium):
    blocks, now_s = ChainedBlocks(65_000), [time.time()]
    capacity_bytes = 40 * (blocks.namespace.slot_bytes + 4096)
    medium.delete = lambda names, deadline: MediumAnswer(Outcome.GONE, why="AccessDenied")
    numbers = itertools.count()
    with closing(open_tier(medium, now_s, capacity_bytes, poll_s=0.01)) as tier:

        def is_refused_for_long():
            blocks.save(tier, [next(numbers)])
            return objects.count("list") > 400

        await_that(lambda: blocks.save(tier, [next(numbers)]) == [Outcome.FULL])
        await_that(is_refused_for_long)
        assert tier.usage().records >= 20


def test_room_is_made_again_after_the_first_objects_tried_were_all_locked(objects, medium):
    blocks, now_s, clock = ChainedBlocks(65_000), [time.time()], ManualClock()
    size = blocks.namespace.slot_bytes + 4096
    numbers = itertools.count()
    with closing(open_tier(medium, now_s, 10 * size, poll_s=0.01, clock=clock)) as tier:
        for _ in range(REFUSED_MAX):
            assert blocks.save(tier, [next(numbers)]) == [Outcome.OK]
        medium.locked = segments(objects)

        def is_refused():
            clock.advance(1.0)
            blocks.save(tier, [next(numbers)])
            return tier.describe()["medium"]["undeletable_bytes"] == REFUSED_MAX * size

        def takes_one():
            clock.advance(RETRY_S / 10)
            return blocks.save(tier, [next(numbers)]) == [Outcome.OK]

        await_that(is_refused)
        await_that(lambda: blocks.save(tier, [next(numbers)]) == [Outcome.FULL])
        for _ in range(20):
            await_that(takes_one)
        assert medium.locked < segments(objects)


def test_a_medium_that_refuses_all_is_asked_with_one_more_object_ever_more_rarely(medium):
    clock, waited_s = ManualClock(), []
    medium.delete = lambda names, deadline: MediumAnswer(Outcome.GONE, why="AccessDenied")
    deletions = DueDeletions(medium, clock)

    def refuse(number):
        deletions.add(f"7d/00/{number:04x}", 0.0)
        assert not deletions.is_trial_due
        deletions.delete_due()

    for number in range(REFUSED_MAX):
        assert not deletions.is_trial_due
        refuse(number)
    for number in range(REFUSED_MAX, REFUSED_MAX + 10):
        begun_s = clock.now()
        while not deletions.is_trial_due:
            clock.advance(10.0)
        waited_s.append(clock.now() - begun_s)
        refuse(number)
    assert waited_s[:4] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]
    assert waited_s[-2:] == [TRIAL_MAX_S, TRIAL_MAX_S]


def test_a_network_fault_is_not_taken_for_a_refusal(objects, medium):
    clock, name = ManualClock(), "7d/00/0001"
    objects.objects[name] = b"x"
    deletions = DueDeletions(medium, clock)
    deletions.add(name, 1.0, nbytes=10)
    clock.advance(2.0)
    answers = [MediumAnswer(Outcome.GONE, why="connection reset")] * 2
    delete = medium.delete
    medium.delete = lambda names, deadline: answers.pop() if answers else delete(names, deadline)
    assert deletions.delete_due() == []
    assert deletions.refused_bytes == 0
    assert deletions.delete_due() == [name]


def test_a_late_answer_is_not_taken_for_a_refusal(objects, medium):
    clock, name = ManualClock(), "7d/00/0001"
    objects.objects[name] = b"x"
    deletions = DueDeletions(medium, clock)
    deletions.add(name, 1.0, nbytes=10)
    clock.advance(2.0)
    medium.delete = lambda names, deadline: MediumAnswer(Outcome.LATE, why="no answer")
    assert deletions.delete_due() == []
    assert deletions.refused_bytes == 0
