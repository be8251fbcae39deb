"""A tier that prefers large batches gets them: small ones wait a while for more blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.movement import Intake
from holdfast.store.options import TierRules
from holdfast.store.write_batches import groups_of
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.testing.store_control import leave
from holdfast.tiers.base import PrefersBatches
from holdfast.tiers.segments.tier import SegmentTier, SegmentTierLimits
from holdfast.tiers.segments.writer import SegmentWriter

MIB = 1 << 20
WAIT_S = 5.0


class BatchTier(SharedMemoryTier):
    """Notes how many records each write had."""

    batch_bytes = MIB
    batch_wait_s = WAIT_S

    def __init__(self):
        super().__init__({})
        self.batches = []

    def write(self, batch):
        self.batches.append(len(batch))
        return super().write(batch)


@pytest.fixture
def tier():
    tier = BatchTier()
    assert isinstance(tier, PrefersBatches)
    return tier


def written(one):
    one.view.wait_until(lambda: not one.view.writing(), "all queued blocks are written")


def test_small_saves_share_a_batch_when_the_first_has_waited(harness, tier) -> None:
    one = harness(32 * MIB, tier)
    for seed in range(3):
        one.save(one.chain(seed, 4))
    one.view.wait_until(lambda: one.view.writing() == 12, "all blocks wait")
    assert tier.batches == []

    def is_written():
        one.clock.advance(WAIT_S + 1)  # the writer may look at the clock later than this
        return not one.view.writing()

    one.view.wait_until(is_written, "all queued blocks are written")
    assert tier.batches == [12]


NEAR, FAR = 1, 2
RECORD_BYTES = 20 << 10
NEAR_BLOCKS = 64
"""Blocks of the tier above, which is asked for what it evicts for half of them."""


def evicting_store(harness, far):
    """Return a store whose near tier offers the far tier everything that it evicts."""
    near = MemoryTier(NEAR_BLOCKS * RECORD_BYTES, name="near")
    takes_all = TierRules(intake=Intake(saves=False, evicted="always"))
    rules = {NEAR: TierRules(intake=Intake(fetched="never")), FAR: takes_all}
    return harness(MIB, near, far, rules=rules)


def push(one, seeds):
    """Save chains of four blocks, each written to the near tier and out of memory."""
    for seed in seeds:
        one.save(one.chain(seed, 4))
        one.view.wait_until(lambda: not one.view.writing(NEAR), "the near tier has it")
        leave(one.store, one.namespace, one.chain(seed, 4).keys)


def test_a_trickle_of_evicted_blocks_shares_a_batch_when_the_first_has_waited(harness, tier):
    one = evicting_store(harness, tier)
    push(one, range(12))
    one.view.wait_until(lambda: one.view.writing(FAR) >= 4, "evicted blocks wait")
    assert tier.batches == []

    def is_written():
        one.clock.advance(WAIT_S + 1)
        return not one.view.writing(FAR)

    one.view.wait_until(is_written, "all queued blocks are written")
    assert len(tier.batches) == 1


def test_blocks_that_are_evicted_next_wait_for_no_larger_batch(harness, tier):
    one = evicting_store(harness, tier)
    for seed in range(40):
        push(one, [seed])
        # The near tier is asked each 8 blocks, and waits for no move when it needs room.
        moved = 4 * (seed + 1) - (NEAR_BLOCKS - 8)
        one.view.wait_until(lambda n=moved: sum(tier.batches) >= n, "what it evicts next is moved")
    assert one.view.dropped_unmoved[NEAR] == 0
    assert len(tier.batches) < 40, "several chains share a batch"


def test_a_batch_of_the_preferred_size_is_written_at_once_and_whole(harness, tier) -> None:
    one = harness(32 * MIB, tier)
    one.save(one.chain(1, 60))
    written(one)
    assert sum(tier.batches) == 60
    assert max(tier.batches) > 32


def test_a_sync_writes_without_the_wait(harness) -> None:
    limits = SegmentTierLimits(ask_s=60.0, gather_s=3_600.0)
    medium = MemoryMedium(MemoryObjects())
    one = harness(32 * MIB, SegmentTier(medium, SegmentWriter("7d"), limits, "segments"))
    chain = one.chain(1, 4)
    one.save(chain)
    assert one.store.sync(one.namespace, chain.keys, 60.0) == 4


def test_what_waits_is_written_when_the_store_closes(harness, tier) -> None:
    one = harness(32 * MIB, tier)
    one.save(one.chain(1, 4))
    one.store.close(write_s=60.0)
    assert sum(tier.batches) == 4


def test_a_batch_takes_a_small_part_of_memory(harness, tier) -> None:
    tier.batch_bytes = 64 * MIB
    one = harness(8 * MIB, tier)
    one.save(one.chain(1, 60))
    written(one)
    assert sum(tier.batches) == 60


@pytest.mark.parametrize(("nbytes", "wait_s"), [("many", 5.0), (-1, 5.0), (MIB, "long"), (MIB, -1)])
def test_a_tier_with_an_impossible_preference_is_written_without_a_wait(
    harness, tier, nbytes, wait_s
) -> None:
    tier.batch_bytes, tier.batch_wait_s = nbytes, wait_s
    one = harness(32 * MIB, tier)
    one.save(one.chain(1, 4))
    written(one)
    assert sum(tier.batches) == 4


@given(st.lists(st.integers(1, 40)), st.integers(1, 100))
def test_every_block_is_in_one_group_and_each_full_group_ends_at_its_size_limit(sizes, most):
    items = list(enumerate(sizes))
    groups = list(groups_of(items, most, lambda item: item[1]))
    assert [item for group in groups for item in group] == items
    for group in groups:
        nbytes = [size for _, size in group]
        assert sum(nbytes[:-1]) < most
        assert sum(nbytes) >= most or group is groups[-1]
