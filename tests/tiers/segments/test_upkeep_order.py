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


@pytest.mark.parametrize("lasting_first", [False, True])
def test_a_block_saved_again_is_found_though_the_deletion_of_its_first_copy_is_learned_later(
    lasting_first,
):
    """The first copy outlasts the new one, and a node learns of its deletion after both copies."""
    objects, blocks = MemoryObjects(), ChainedBlocks(65_000)
    with closing(open_tier(objects, age="30d", poll_s=3_600.0)) as lasting:
        assert blocks.save(lasting, range(4)) == [Outcome.OK] * 4
    first = index_names(objects)
    with closing(open_tier(objects, read_s=2.0)) as tier:
        tier.delete(blocks.gets([1, 3]))
        deletion = index_names(objects) - first
        assert blocks.save(tier, [1]) == [Outcome.OK]
        last = index_names(objects) - first - deletion
        hidden = {name: objects.objects.pop(name) for name in deletion | last}
        if not lasting_first:
            hidden |= {name: objects.objects.pop(name) for name in first}
        with closing(open_tier(objects)) as third:
            for names in [last] if lasting_first else [last, first]:
                objects.objects.update({name: hidden[name] for name in names})
                await_that(lambda: blocks.load(third, [1]) == [Outcome.OK])
            await_that(lambda: third.describe()["medium"]["segments"] == 2)
            assert third.held(blocks.namespace, blocks.keys(4), 0) == 4
            objects.objects.update({name: hidden[name] for name in deletion})
            await_that(lambda: third.held(blocks.namespace, blocks.keys(4), 0) == 3)
            assert blocks.load(third, range(4)) == [Outcome.OK] * 3 + [Outcome.MISS]


def test_a_deletion_right_after_the_start_waits_for_the_first_listing():
    objects, blocks = MemoryObjects(), ChainedBlocks(65_000)
    with closing(open_tier(objects)) as earlier:
        assert blocks.save(earlier, range(4)) == [Outcome.OK] * 4
    late = [Outcome.LATE] * 2
    objects.fault = lambda verb, _: late.pop() if verb == "list" and late else Outcome.OK
    with closing(open_tier(objects)) as tier:
        tier.delete(blocks.gets([1]))
        assert tier.held(blocks.namespace, blocks.keys(4), 0) == 1


def index_names(objects):
    """Return the names of the index objects that are there now."""
    return {name for name in list(objects.objects) if name.startswith("index/")}


def test_a_block_of_which_two_writers_have_copies_is_found_after_one_was_found_damaged():
    objects, blocks = MemoryObjects(), ChainedBlocks(65_000)
    with closing(open_tier(objects, poll_s=3_600.0)) as brief:
        await_that(lambda: brief.held(blocks.namespace, blocks.keys(2), 0) == 0)
        with closing(open_tier(objects, age="30d", poll_s=3_600.0)) as lasting:
            assert blocks.save(lasting, range(2)) == [Outcome.OK] * 2
        assert blocks.save(brief, range(2)) == [Outcome.OK] * 2
        [name] = [name for name in objects.objects if name.startswith("30d/")]
        whole = objects.objects[name]
        objects.objects[name] = whole[:-40_000] + bytes([whole[-40_000] ^ 1]) + whole[-39_999:]
        with closing(open_tier(objects)) as reader:
            gets = blocks.gets(range(2))
            assert reader.read(gets) == [Outcome.OK] * 2
            assert not blocks.is_right(gets[1].into, gets[1].key)
            reader.delete_corrupt(gets)
            assert blocks.load(reader, range(2)) == [Outcome.OK] * 2


def test_all_copies_of_a_deleted_block_are_gone_for_all_nodes():
    objects, blocks = MemoryObjects(), ChainedBlocks(65_000)
    with closing(open_tier(objects, poll_s=3_600.0)) as brief:
        await_that(lambda: brief.held(blocks.namespace, blocks.keys(2), 0) == 0)
        with closing(open_tier(objects, age="30d", poll_s=3_600.0)) as lasting:
            assert blocks.save(lasting, range(2)) == [Outcome.OK] * 2
        assert blocks.save(brief, range(2)) == [Outcome.OK] * 2
        with closing(open_tier(objects)) as deleter, closing(open_tier(objects)) as reader:
            await_that(lambda: reader.held(blocks.namespace, blocks.keys(2), 0) == 2)
            assert blocks.load(deleter, range(2)) == [Outcome.OK] * 2
            deleter.delete(blocks.gets([1]))
            assert blocks.load(deleter, range(2)) == [Outcome.OK, Outcome.MISS]
            await_that(lambda: blocks.load(reader, range(2)) == [Outcome.OK, Outcome.MISS])
