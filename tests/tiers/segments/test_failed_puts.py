"""A put that failed may have stored its object: it serves no wrong block, and leaves or counts."""

import time
from contextlib import closing

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.medium import MediumAnswer
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

WITHIN_S = 60.0


def open_tier(objects, medium=None, read_s=60.0):
    limits = SegmentTierLimits(read_s=read_s, write_s=60.0, ask_s=60.0, poll_s=0.05)
    return SegmentTier(medium or MemoryMedium(objects), SegmentWriter("7d"), limits, "segments")


def await_that(reached):
    end_s = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end_s, "not reached"
        time.sleep(0.02)


@pytest.fixture
def objects():
    return MemoryObjects()


def segments(objects):
    return [name for name in objects.objects if not name.startswith("index/")]


def test_an_object_whose_put_failed_is_never_served_and_is_deleted(objects):
    blocks = ChainedBlocks(65_000)

    def store_and_fail(verb, name):
        if verb == "put" and name.startswith("7d/"):
            objects.objects[name] = b"half"
            return Outcome.LATE
        return Outcome.OK

    with closing(open_tier(objects, read_s=0.2)) as tier:
        tier.held(blocks.namespace, blocks.keys(1), 0)
        objects.fault = store_and_fail
        assert blocks.save(tier, range(4)) == [Outcome.LATE] * 4
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 0
        assert segments(objects)
        await_that(lambda: not segments(objects))


def test_an_index_object_that_was_not_stored_safely_lists_nothing_for_its_writer(objects):
    """It may be found on the medium, and be gone after a crash."""

    class HalfStored(MemoryMedium):
        def put(self, name, parts, deadline):
            answer = super().put(name, parts, deadline)
            is_index = name.startswith("index/")
            return MediumAnswer(Outcome.GONE, why="not flushed") if is_index else answer

    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects, medium=HalfStored(objects))) as tier:
        assert blocks.save(tier, range(2)) == [Outcome.GONE] * 2
        listed = objects.count("list")
        await_that(lambda: objects.count("list") >= listed + 2)
        assert tier.known(blocks.puts(range(2))) == [False] * 2


class ResetConnections(MemoryMedium):
    """Stores index objects and answers that it did not, while a test asks for it."""

    resets = False

    def put(self, name, parts, deadline):
        answer = super().put(name, parts, deadline)
        if self.resets and name.startswith("index/"):
            return MediumAnswer(Outcome.GONE, why="connection reset by peer")
        return answer


def test_a_segment_that_others_learned_of_is_not_swept_though_its_index_object_was_not_acknowledged(
    objects,
):
    blocks, clock, now_s = ChainedBlocks(65_000), ManualClock(), [time.time()]
    medium = ResetConnections(objects)
    limits = SegmentTierLimits(read_s=60.0, write_s=60.0, ask_s=60.0, poll_s=0.05)
    writer = SegmentWriter("7d", clock, wall_s=lambda: now_s[0])
    with (
        closing(SegmentTier(medium, writer, limits, "segments")) as one,
        closing(open_tier(objects)) as other,
    ):
        one.held(blocks.namespace, blocks.keys(1), 0)
        medium.resets = True
        assert blocks.save(one, range(2)) == [Outcome.GONE] * 2
        await_that(lambda: other.held(blocks.namespace, blocks.keys(2), 0) == 2)
        now_s[0] += 3_700.0
        clock.advance(3_700.0)  # a sweep is due
        rounds = objects.calls.count(("list", "index")) + 6
        await_that(lambda: objects.calls.count(("list", "index")) >= rounds)
        assert segments(objects), "swept while the index object could not be put again"
        medium.resets = False
        await_that(lambda: ("list", "7d") in objects.calls)
        rounds = objects.calls.count(("list", "index")) + 6
        await_that(lambda: objects.calls.count(("list", "index")) >= rounds)
        assert one.held(blocks.namespace, blocks.keys(2), 0) == 2
        assert blocks.load(other, range(2)) == [Outcome.OK] * 2


def test_a_block_is_acknowledged_only_when_other_processes_can_find_it(objects):
    blocks = ChainedBlocks(65_000)
    with closing(open_tier(objects)) as tier:
        tier.held(blocks.namespace, blocks.keys(1), 0)
        objects.fault = lambda verb, name: (
            Outcome.GONE if verb == "put" and name.startswith("index/") else Outcome.OK
        )
        assert blocks.save(tier, range(4)) == [Outcome.GONE] * 4
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 0
