"""What a shared tier lost or has out of place is written there again, from memory."""

import threading

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
    assert all(one.view.is_evictable(one.namespace, key) for key in chain.keys)
    tier.answers, tier.gone = False, lambda place: True
    with one.view.still():
        one.store.housekeep()
        assert not any(one.view.is_evictable(one.namespace, key) for key in chain.keys)
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
    other.store.look(other.namespace, chain.keys, 60.0)
    tier.gone = lambda place: True
    other.store.housekeep()
    assert other.store.cover(other.namespace, chain.keys).blocks == 0
    assert other.view.entries == 0


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
    other.store.look(other.namespace, chain.keys, 60.0)
    assert other.read(chain) == 5
    other.flush()
    size = other.namespace.slot_bytes
    assert tier.usage().written_bytes == 2 * size
    assert other.view.is_saved(other.namespace, chain.keys[3])
    assert other.read(chain) == 5


def test_writes_to_an_unreachable_pool_are_deferred_until_it_is_back(harness):
    by_key = {}
    one = harness(MIB, tier := Shifting(by_key))
    tier.there = False
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    assert tier.batches == 0, "nothing was sealed, copied or sent"
    assert one.view.deferred(1) == 5
    evictable = [one.view.is_evictable(one.namespace, key) for key in chain.keys]
    assert all(evictable), "memory is not held for it"
    one.store.housekeep()
    assert not by_key
    tier.there = True
    one.store.housekeep()
    one.flush()
    assert {key for _, key in by_key} == set(chain.keys)
    assert one.view.deferred(1) == 0


def test_a_batch_that_no_member_took_is_written_when_the_pool_is_back(harness):
    by_key = {}
    one = harness(MIB, tier := Shifting(by_key))
    tier.answers = False
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    assert tier.batches == 1
    assert one.view.deferred(1) == 5
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
    assert one.view.entries < 150
    assert one.view.deferred(1) <= one.view.used_slots(one.namespace)


def test_blocks_queued_for_the_disk_stay_in_memory_during_a_pool_outage(harness):
    one = harness(MIB, disk := Slow(4 * MIB), tier := Shifting({}))
    tier.there = False
    chain = one.chain(1, 2)
    one.save(chain)
    assert disk.begun.wait(60)
    one.view.wait_until(lambda: one.view.deferred(2) == 2, "the pool's writes are deferred")
    assert not any(one.view.is_evictable(one.namespace, key) for key in chain.keys)
    disk.go_on.set()
    one.flush()
    assert all(one.view.is_saved(one.namespace, key) for key in chain.keys)
