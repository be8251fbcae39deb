"""What a shared tier lost or has out of place is written there again, from memory."""

import threading

from holdfast.store.rewrite import put_off
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.tiers.base import Moving, segment_place

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

    def strayed(self, keys, record_bytes):
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


def test_what_was_lost_and_is_still_in_memory_is_written_again(rig):
    by_key, tier = {}, None
    one = rig(MIB, tier := Shifting(by_key))
    assert isinstance(tier, Moving)
    chains = [one.chain(seed, 5) for seed in range(4)]
    for chain in chains:
        one.save(chain)
    one.settle()
    dead = {segment_place(chain.segment(0)) for chain in chains[:2]}
    kept = dict(by_key)
    for chain in chains[:2]:
        for key in chain.keys:
            del by_key[key]
    tier.gone = dead.__contains__
    one.store.keep_house()
    one.settle()
    assert by_key == kept
    assert tier.usage().written_bytes == sum(len(r) for _, r in kept.values()) * 3 // 2


def test_the_only_copy_is_not_given_up_for_one_that_is_lost(rig):
    one = rig(MIB, tier := Shifting({}))
    chain = one.chain(1, 5)
    one.save(chain)
    one.settle()
    rows = list(one.store.states.index.rows())
    assert all(one.store.states.evictable(row) for row in rows)
    tier.answers, tier.gone = False, lambda place: True
    with one.store.states.lock:
        one.store.keep_house()
        assert not any(one.store.states.evictable(row) for row in rows)
    one.settle()
    assert one.read(chain) == 5


def test_hearsay_of_what_is_lost_is_forgotten(rig):
    by_key = {}
    one, other = rig(MIB, SharedMemoryTier(by_key, "pool")), rig(MIB, tier := Shifting(by_key))
    chain = one.chain(1, 5)
    one.save(chain)
    one.settle()
    other.store.look(other.world, chain.keys)
    tier.gone = lambda place: True
    other.store.keep_house()
    assert other.store.cover(other.world, chain.keys).blocks == 0
    assert len(other.store.states.index) == 0


def test_strays_are_written_again_once_they_have_landed(rig):
    by_key = {}
    one, other = rig(MIB, SharedMemoryTier(by_key, "pool")), rig(MIB, tier := Shifting(by_key))
    chain = one.chain(1, 5)
    one.save(chain)
    one.settle()
    tier.astray = {chain.keys[1], chain.keys[3]}
    other.store.look(other.world, chain.keys)
    assert other.read(chain) == 5
    other.settle()
    size = other.world.record_bytes
    assert tier.usage().written_bytes == 2 * size
    assert other.store.states.saved_below(other.store.states.index.find(chain.keys[3]))
    assert other.read(chain) == 5


def test_for_a_pool_where_nobody_is_nothing_is_made_ready_and_all_is_written_once_it_heals(rig):
    by_key = {}
    one = rig(MIB, tier := Shifting(by_key))
    tier.there = False
    chain = one.chain(1, 5)
    one.save(chain)
    one.settle()
    assert tier.batches == 0, "nothing was sealed, copied or sent"
    states = one.store.states
    assert states.put_off == [set(chain.keys)]
    assert all(states.evictable(row) for row in states.index.rows()), "memory is not held for it"
    one.store.keep_house()
    assert not by_key
    tier.there = True
    one.store.keep_house()
    one.settle()
    assert set(by_key) == set(chain.keys)
    assert states.put_off == [set()]


def test_the_batch_that_finds_nobody_there_is_written_once_somebody_is(rig):
    by_key = {}
    one = rig(MIB, tier := Shifting(by_key))
    tier.answers = False
    chain = one.chain(1, 5)
    one.save(chain)
    one.settle()
    assert tier.batches == 1
    assert one.store.states.put_off == [set(chain.keys)]
    tier.there = tier.answers = True
    one.store.keep_house()
    one.settle()
    assert set(by_key) == set(chain.keys)


def test_what_left_memory_meanwhile_is_not_waited_for(rig):
    one = rig(MIB, tier := Shifting({}))
    tier.there = False
    for seed in range(30):
        one.save(one.chain(seed, 5))
    one.settle()
    states = one.store.states
    here = {key for key in states.index.keys if key is not None}
    assert len(here) < 150
    assert states.put_off[0] <= here


def test_what_waits_for_the_disk_stays_in_memory_though_the_pool_is_away(rig):
    one = rig(MIB, disk := Slow(4 * MIB), tier := Shifting({}))
    tier.there = False
    chain = one.chain(1, 2)
    one.save(chain)
    states = one.store.states
    assert disk.begun.wait(60)
    put_off(states, 2)
    assert not any(states.evictable(row) for row in states.index.rows())
    disk.go_on.set()
    one.settle()
    assert all(states.saved_below(row) for row in states.index.rows())
