"""What a shared tier lost or has out of place is written there again, from memory."""

import threading

from holdfast.store.rewrite import defer_queued
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.tiers.base import Rebalancing, segment_place

MIB = 1 << 20


class Shifting(SharedMemoryTier):
    """A shared tier that says what the test wants it to say."""

    def __init__(self, records):
        super().__init__(records, "pool")
        self.astray = set()
        self.gone = None
        self.there = True
        self.batches = 0

    def write(self, batch):
        self.batches += 1
        outcomes = super().write(batch)
        self.there = self.there and self.answers
        return outcomes

    def reachable(self):
        return self.there

    def misplaced(self, namespace, keys):
        found = self.astray.intersection(keys)
        self.astray -= found
        return found

    def lost(self):
        gone, self.gone = self.gone, None
        return gone


class Slow(MemoryTier):
    """A tier that is written to when the test lets it."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write(self, batch):
        self.begun.set()
        assert self.go_on.wait(60)
        return super().write(batch)


def test_records_lost_by_a_shared_tier_and_still_in_memory_are_written_again(harness):
    by_key, tier = {}, None
    one = harness(MIB, tier := Shifting(by_key))
    assert isinstance(tier, Rebalancing)
    chains = [one.chain(seed, 5) for seed in range(4)]
    for chain in chains:
        one.save(chain)
    one.flush()
    dead = {segment_place(chain.segment(0)) for chain in chains[:2]}
    kept = dict(by_key)
    for chain in chains[:2]:
        for key in chain.keys:
            del by_key[one.namespace, key]
    tier.gone = dead.__contains__
    one.store.housekeep()
    one.flush()
    assert by_key == kept
    assert tier.usage().written_bytes == sum(len(r) for _, r in kept.values()) * 3 // 2


def test_the_only_copy_in_memory_is_kept_if_the_shared_copy_is_lost(harness):
    one = harness(MIB, tier := Shifting({}))
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    rows = list(one.store.table.index.rows())
    assert all(one.store.table.evictable(row) for row in rows)
    tier.answers, tier.gone = False, lambda place: True
    with one.store.table.lock:
        one.store.housekeep()
        assert not any(one.store.table.evictable(row) for row in rows)
    one.flush()
    assert one.read(chain) == 5


def test_remote_lookups_of_lost_records_are_forgotten(harness):
    by_key = {}
    one, other = (
        harness(MIB, SharedMemoryTier(by_key, "pool")),
        harness(MIB, tier := Shifting(by_key)),
    )
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    other.store.look(other.namespace, chain.keys)
    tier.gone = lambda place: True
    other.store.housekeep()
    assert other.store.cover(other.namespace, chain.keys).blocks == 0
    assert len(other.store.table.index) == 0


def test_misplaced_records_are_written_again_after_they_are_fetched(harness):
    by_key = {}
    one, other = (
        harness(MIB, SharedMemoryTier(by_key, "pool")),
        harness(MIB, tier := Shifting(by_key)),
    )
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    tier.astray = {chain.keys[1], chain.keys[3]}
    other.store.look(other.namespace, chain.keys)
    assert other.read(chain) == 5
    other.flush()
    size = other.namespace.slot_bytes
    assert tier.usage().written_bytes == 2 * size
    row = other.store.table.index.find(other.namespace, chain.keys[3])
    assert other.store.table.state(row).is_saved
    assert other.read(chain) == 5


def test_writes_to_an_unreachable_pool_are_deferred_until_it_is_back(harness):
    by_key = {}
    one = harness(MIB, tier := Shifting(by_key))
    tier.there = False
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    assert tier.batches == 0, "nothing was sealed, copied or sent"
    table = one.store.table
    assert table.queues._deferred == [
        set(one.store.table.index.find_all(one.namespace, chain.keys))
    ]
    assert all(table.evictable(row) for row in table.index.rows()), "memory is not held for it"
    one.store.housekeep()
    assert not by_key
    tier.there = True
    one.store.housekeep()
    one.flush()
    assert {key for _, key in by_key} == set(chain.keys)
    assert table.queues._deferred == [set()]


def test_a_batch_that_no_member_took_is_written_when_the_pool_is_back(harness):
    by_key = {}
    one = harness(MIB, tier := Shifting(by_key))
    tier.answers = False
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    assert tier.batches == 1
    assert one.store.table.queues._deferred == [
        set(one.store.table.index.find_all(one.namespace, chain.keys))
    ]
    tier.there = tier.answers = True
    one.store.housekeep()
    one.flush()
    assert {key for _, key in by_key} == set(chain.keys)


def test_blocks_evicted_during_an_outage_are_not_deferred_any_more(harness):
    one = harness(MIB, tier := Shifting({}))
    tier.there = False
    for seed in range(30):
        one.save(one.chain(seed, 5))
    one.flush()
    table = one.store.table
    here = set(table.index.rows())
    assert len(here) < 150
    assert table.queues._deferred[0] <= here


def test_blocks_queued_for_the_disk_stay_in_memory_during_a_pool_outage(harness):
    one = harness(MIB, disk := Slow(4 * MIB), tier := Shifting({}))
    tier.there = False
    chain = one.chain(1, 2)
    one.save(chain)
    table = one.store.table
    assert disk.begun.wait(60)
    defer_queued(table, 2)
    assert not any(table.evictable(row) for row in table.index.rows())
    disk.go_on.set()
    one.flush()
    assert all(table.state(row).is_saved for row in table.index.rows())
