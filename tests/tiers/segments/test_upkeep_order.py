"""A node learns the same from index objects in whichever order it finds them."""

import time
from contextlib import closing

import pytest

from holdfast.errors import Outcome
from holdfast.testing.chained import ChainedBlocks
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.index_log import MERGE_COUNT
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

WITHIN_S = 60.0


def open_tier(objects, age="7d", poll_s=0.05, read_s=60.0):
    limits = SegmentTierLimits(read_s=read_s, write_s=60.0, ask_s=60.0, poll_s=poll_s)
    return SegmentTier(MemoryMedium(objects), SegmentWriter(age), limits, "segments")


def await_that(reached):
    end_s = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end_s, "not reached"
        time.sleep(0.02)


@pytest.mark.parametrize("is_late", [False, True], ids=["one listing", "two listings"])
def test_a_block_saved_again_after_its_deletion_is_held_though_the_deleted_copy_outlasts_it(
    is_late,
):
    """A node that starts later learns of both copies and of the deletion in another order."""
    objects, blocks, others = MemoryObjects(), ChainedBlocks(65_000), ChainedBlocks(4_000)
    with (
        closing(open_tier(objects, age="30d", poll_s=3_600.0)) as lasting,
        closing(open_tier(objects, read_s=2.0)) as tier,
    ):
        assert blocks.save(lasting, range(4)) == [Outcome.OK] * 4
        late = {name for name in objects.objects if name.startswith("index/") and is_late}
        await_that(lambda: tier.held(blocks.namespace, blocks.keys(4), 0) == 4)
        tier.delete(blocks.gets([1, 3]))
        assert blocks.save(tier, [1]) == [Outcome.OK]
        for number in range(MERGE_COUNT):
            assert others.save(tier, [number]) == [Outcome.OK]
        await_that(lambda: sum(n.startswith("index/") for n in objects.objects) < 16)

        def answer_late_once(verb, name):
            if verb != "read" or name not in late:
                return Outcome.OK
            late.discard(name)
            return Outcome.LATE

        objects.fault = answer_late_once
        with closing(open_tier(objects)) as third:
            assert third.held(blocks.namespace, blocks.keys(4), 0) == 3
            assert blocks.load(third, range(4)) == [Outcome.OK] * 3 + [Outcome.MISS]
