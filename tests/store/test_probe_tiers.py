"""A local tier that was never read is probed before the first plan needs its speed."""

import threading
import time

from holdfast.policy.retention import Retention
from holdfast.store.block_table import ROWS_AT_ONCE
from holdfast.store.probe_tiers import BLOCKS, probe_tier, unmeasured_tiers
from holdfast.testing.memory import MemoryTier
from holdfast.tiers.base import TierUsage

MIB = 1 << 20


class Timed(MemoryTier):
    """Each block moves the clock by a second."""

    def read(self, batch):
        self.clock.advance(len(batch))
        return super().read(batch)


def test_a_tier_is_unmeasured_from_its_first_blocks_to_its_first_read(harness):
    one = harness(2 * MIB, Timed(8 * MIB))
    one.tier.clock = one.clock
    assert unmeasured_tiers(one.store) == []
    one.save(one.chain(1, BLOCKS))
    one.flush()
    assert unmeasured_tiers(one.store) == [1]
    probe_tier(one.store, 1)
    assert unmeasured_tiers(one.store) == []
    estimate = one.store.estimates.estimates(one.namespace.domain)[1]
    assert estimate.seconds(BLOCKS * one.namespace.slot_bytes) > BLOCKS / 2
    before = one.clock.now()
    probe_tier(one.store, 1)
    assert one.clock.now() == before, "once is enough"


def test_a_probe_finds_a_tiers_blocks_behind_many_index_rows_without_a_copy(harness):
    one = harness(2 * MIB, Timed(8 * MIB))
    one.tier.clock = one.clock
    for seed in range(100, 100 + ROWS_AT_ONCE // 100 + 2):
        one.save(one.chain(seed, 100), retention=Retention.EPHEMERAL)
    one.save(one.chain(1, BLOCKS))
    one.flush()
    probe_tier(one.store, 1)
    assert one.store.estimates.reads(1)
    assert one.nothing_is_left_over()


def test_a_tier_is_not_probed_before_its_blocks_are_indexed(harness):
    one = harness(2 * MIB, MemoryTier(8 * MIB))
    one.tier.usage = lambda: TierUsage(8 * MIB, 0, BLOCKS)
    assert unmeasured_tiers(one.store) == []


def test_an_empty_tier_is_not_probed(harness):
    one = harness(2 * MIB, MemoryTier(8 * MIB))
    probe_tier(one.store, 1)
    assert one.store.estimates.reads(1) == 0


def test_blocks_may_be_dropped_while_they_are_probed(harness):
    """Blocks that are dropped while they are read leave nothing behind."""
    one = harness(2 * MIB, MemoryTier(8 * MIB))
    one.save(one.chain(1, BLOCKS))
    one.flush()
    reached, go_on = threading.Event(), threading.Event()
    read = one.tier.read

    def slowly(batch):
        reached.set()
        assert go_on.wait(60)
        return read(batch)

    one.tier.read = slowly
    meeting = threading.Thread(target=probe_tier, args=(one.store, 1))
    if not one.store.estimates.reads(1):
        meeting.start()
        assert reached.wait(60)
    one.store.drop("*")
    go_on.set()
    if meeting.ident is not None:
        meeting.join()
    deadline = time.monotonic() + 60
    while one.store.estimates.estimates(one.namespace.domain)[1].queued_bytes or (one.view.entries):
        assert time.monotonic() < deadline, "something was left behind"
