"""The read street: what was saved comes back byte for byte, or is named missing."""

import threading
import time

import pytest

from holdfast.errors import Outcome
from holdfast.policy.retention import Retention
from holdfast.store.states import HOST
from holdfast.testing.memory import MemoryTier
from holdfast.testing.payloads import fill_record, header_of

MIB = 1 << 20


def test_what_was_saved_comes_back(rig) -> None:
    one = rig()
    chain = one.chain(1, 10)
    assert one.save(chain) == 10
    assert one.read(chain) == 10


def test_a_longer_context_gets_its_held_prefix(rig) -> None:
    one = rig()
    chain = one.chain(1, 10)
    one.save(chain, 0, 6)
    assert one.store.cover(one.world, chain.keys).blocks == 6
    assert one.read(chain) == 6


def test_nothing_held_is_a_miss(rig) -> None:
    one = rig()
    fetched = one.store.fetch(one.world, one.chain(1, 3).keys, 1.0)
    assert fetched.places == []
    assert fetched.outcome is Outcome.MISS


def test_no_time_means_late_and_nothing_copied(rig) -> None:
    one = rig()
    chain = one.chain(1, 4)
    one.save(chain)
    fetched = one.store.fetch(one.world, chain.keys, 0.0)
    assert fetched.places == []
    assert "deadline" in fetched.reason


def test_blocks_demoted_to_the_tier_below_climb_again(rig) -> None:
    one = rig(MIB, MemoryTier(64 * MIB))
    chains = [one.chain(seed, 20) for seed in range(6)]
    for chain in chains:
        for start in range(0, 20, 5):
            one.save(chain, start, start + 5)
            one.settle()
    covered = one.store.cover(one.world, chains[0].keys)
    assert covered.blocks == 20
    assert covered.sources.get("memory", 0) > 0
    for chain in chains:
        assert one.read(chain) == 20
    assert one.store.cover(one.world, chains[-1].keys).sources == {"host": 20}


def test_a_chain_longer_than_the_arena_gives_what_fits(rig) -> None:
    one = rig(MIB, MemoryTier(64 * MIB))
    chain = one.chain(1, 100)
    for start in range(0, 100, 5):
        one.save(chain, start, start + 5)
        one.settle()
    landed = one.read(chain)
    assert 0 < landed <= one.store.states.host(one.world).slots(one.world.record_bytes)


def test_a_leased_block_is_never_evicted_while_it_is_read(rig) -> None:
    one = rig(MIB)
    chain = one.chain(1, 10)
    one.save(chain)
    fetched = one.store.fetch(one.world, chain.keys, 1.0)
    arena = one.store.arena(one.world.domain).view
    before = [bytes(arena[place : place + one.world.record_bytes]) for place in fetched.places]
    for seed in range(2, 30):
        one.save(one.chain(seed, 10))
    after = [bytes(arena[place : place + one.world.record_bytes]) for place in fetched.places]
    assert before == after
    assert one.store.release(fetched.lease)


def test_an_expired_lease_says_so(rig) -> None:
    one = rig()
    chain = one.chain(1, 3)
    one.save(chain)
    fetched = one.store.fetch(one.world, chain.keys, 1.0)
    one.clock.advance(1.0 + one.store.lease_s)
    one.store.keep_house()
    assert not one.store.release(fetched.lease)


@pytest.mark.parametrize("offset", [0, 5, 17, 40, 70, 90, 100, 127, 128, 5000, 128 + (16 << 10)])
def test_a_flipped_byte_in_the_arena_is_never_served_and_the_next_save_repairs_it(
    rig, offset: int
) -> None:
    one = rig()
    chain = one.chain(1, 5)
    one.save(chain)
    fetched = one.store.fetch(one.world, chain.keys, 1.0)
    one.store.release(fetched.lease)
    one.store.arena(one.world.domain).view[fetched.places[2] + offset] ^= 0x40
    again = one.store.fetch(one.world, chain.keys, 1.0)
    assert len(again.places) == 2
    assert again.outcome in (Outcome.CORRUPT, Outcome.MISS)
    one.store.release(again.lease)
    assert one.store.status()["faults"][-1]["tier"] == "host"
    assert one.save(chain) == 1
    assert one.read(chain) == 5


def test_two_blocks_swapped_below_are_a_miss(rig) -> None:
    records = {}
    one = rig(MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, 4)
    one.save(chain)
    one.settle()
    places = sorted(records)
    records[places[1]], records[places[2]] = records[places[2]], records[places[1]]
    evict_all(one)
    assert one.read(chain) == 1


def test_a_leased_slot_found_corrupt_is_not_reused_under_its_reader(rig) -> None:
    one = rig(MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    reader = one.store.fetch(one.world, chain.keys, 1.0)
    one.store.arena(one.world.domain).view[reader.places[0] + 500] ^= 1
    second = one.store.fetch(one.world, chain.keys, 1.0)
    assert second.places == []
    one.store.release(second.lease)
    reserved = one.store.reserve(one.world, one.chain(2, 50).keys, b"f" * 16, 0)
    assert reader.places[0] not in reserved.places
    one.store.abort(reserved.ticket)
    one.store.release(reader.lease)
    taken = one.store.reserve(one.world, one.chain(3, 61).keys, b"f" * 16, 0)
    assert reader.places[0] in taken.places


def test_many_readers_of_one_context_share_one_climb(rig) -> None:
    tier = CountingTier(64 * MIB)
    one = rig(2 * MIB, tier)
    chain = one.chain(1, 16)
    one.save(chain)
    one.settle()
    evict_all(one)
    landed = []
    threads = [
        threading.Thread(target=lambda: landed.append(one.read(chain, 30.0))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert landed == [16] * 8
    assert tier.reads == 16


def test_a_key_that_is_asked_for_twice_climbs_once_and_leaves_nothing_behind(rig) -> None:
    one = rig(tier=CountingTier(4 * MIB))
    chain = one.chain(1, 3)
    one.save(chain)
    below_only(one, chain)
    keys = [*chain.keys, *chain.keys[:2]]
    fetched = one.store.fetch(one.world, keys, 5.0)
    assert (len(fetched.places), len(set(fetched.places)), one.tier.reads) == (5, 3, 3)
    assert one.store.release(fetched.lease)
    assert one.store.pin(one.world, keys, 5.0) == 5
    assert one.store.cover(one.world, keys).blocks == 5
    one.clock.advance(6.0)
    one.store.keep_house()
    assert nothing_is_left_over(one)
    assert one.store.states.host(one.world).usage().records == 3
    reserved = one.store.reserve(one.world, keys, chain.fingerprint, 0)
    assert reserved.places == [-1] * 5
    assert one.store.commit(reserved.ticket, Retention.DURABLE) == 0
    assert nothing_is_left_over(one)
    one.store.drop("*")
    assert (len(one.store.states.index), one.store.states.fill.used[HOST].total()) == (0, 0)


@pytest.mark.parametrize("place", ["host", "memory"])
def test_what_is_lent_stays_until_it_is_released(rig, place) -> None:
    """A peer may take its time; what an engine fetches it must copy within the lease."""
    one = rig(tier=MemoryTier(4 * MIB))
    chain = one.chain(1, 4)
    one.save(chain)
    one.settle()
    if place == "memory":
        evict_all(one)
    lent = one.store.lend(one.world, chain.keys, 5.0)
    assert lent.sources == {place: 4}
    fetched = one.store.fetch(one.world, chain.keys, 5.0)
    one.clock.advance(1e6)
    with one.store.states.lock:
        one.store.states.expire(one.clock.now())
    assert not one.store.release(fetched.lease)
    assert one.store.release(lent.lease)
    assert not one.store.status()["leases"]


def evict_all(one) -> None:
    with one.store.states.lock:
        for row in list(one.store.states.index.rows()):
            one.store.states.vacate(row, 0)


class CountingTier(MemoryTier):
    """Counts the records read."""

    reads = 0

    def read(self, batch):
        self.reads += len(batch)
        return super().read(batch)


class RaisingTier(MemoryTier):
    """Reads end in an error, as no tier's should, until told otherwise."""

    broken = True

    def read(self, batch):
        if self.broken:
            raise RuntimeError("read failed")
        return super().read(batch)


def nothing_is_left_over(one) -> bool:
    states = one.store.states
    with states.lock:
        pinned = sum(states.index.leases)
        return not (pinned or states.leases or states.loading or states.leaving)


def below_only(one, chain) -> None:
    one.settle()
    with one.store.states.lock:
        for key in chain.keys:
            one.store.states.vacate(one.store.states.index.find(key), 0)


def test_a_tier_that_raises_errors_is_a_miss_and_nobodys_error(rig) -> None:
    one = rig(2 * MIB, RaisingTier(64 * MIB))
    chain = one.chain(1, 20)
    one.save(chain)
    below_only(one, chain)
    fetched = one.store.fetch(one.world, chain.keys, 5.0)
    assert (fetched.places, fetched.outcome) == ([], Outcome.GONE)
    assert one.store.release(fetched.lease)
    assert nothing_is_left_over(one)
    one.tier.broken = False
    assert one.save(chain) == 20, "what could not be read is written again"
    below_only(one, chain)
    assert one.read(chain) == 20


def test_after_the_end_what_lies_below_is_a_miss(rig) -> None:
    one = rig(2 * MIB, MemoryTier(64 * MIB))
    chain, here = one.chain(1, 20), one.chain(2, 3)
    one.save(chain)
    below_only(one, chain)
    one.save(here)
    one.store.close()
    fetched = one.store.fetch(one.world, chain.keys, 5.0)
    assert fetched.places == []
    assert one.store.release(fetched.lease)
    assert one.read(here) == 3
    assert nothing_is_left_over(one)
    assert one.store.states.host(one.world).usage().records == 3


class HeldTier(MemoryTier):
    """Reads wait until they are let go."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, name="held")
        self.begun, self.go = threading.Event(), threading.Event()

    def read(self, batch):
        self.begun.set()
        assert self.go.wait(60)
        return super().read(batch)


def put_damaged(one, key) -> None:
    """Put a block as a peer does whose record lost a bit on the way."""
    header = header_of(one.world, key)
    (berth,) = one.store.berth([header])
    assert berth.slot is not None
    fill_record(berth.slot, header)
    berth.slot[5000] ^= 1
    assert one.store.adopt([berth]) == [Outcome.OK]


def fetching(one, keys) -> tuple[threading.Thread, list]:
    fetched: list = []
    work = threading.Thread(target=lambda: fetched.append(one.store.fetch(one.world, keys, 60.0)))
    work.start()
    return work, fetched


def test_what_a_peer_puts_while_a_fetch_waits_is_not_taken_for_what_climbed(rig) -> None:
    fast, slow = MemoryTier(4 * MIB), HeldTier(4 * MIB)
    one = rig(2 * MIB, fast, slow)
    keys = one.chain(1, 2).keys
    one.save(one.chain(1, 2))
    one.settle()
    evict_all(one)
    states = one.store.states
    first, second = states.index.find(keys[0]), states.index.find(keys[1])
    with states.lock:
        place = states.index.places[1][first]
        states.vacate(first, 2)
        states.vacate(second, 1)
    del fast._records[place]  # its region was reclaimed a moment ago
    work, fetched = fetching(one, keys)
    assert slow.begun.wait(60)
    until = time.monotonic() + 60
    while first in states.loading:
        assert time.monotonic() < until, "the first block is never found missing"
    put_damaged(one, keys[0])
    assert states.index.places[HOST][first] >= 0
    slow.go.set()
    work.join(60)
    assert fetched[0].places == []
    assert one.store.release(fetched[0].lease)
    assert nothing_is_left_over(one)
    assert one.store.fetch(one.world, keys, 5.0).outcome is Outcome.CORRUPT


def test_what_was_verified_in_one_slot_says_nothing_of_another(rig, monkeypatch) -> None:
    slow = HeldTier(4 * MIB)
    one = rig(2 * MIB, slow)
    keys = one.chain(1, 2).keys
    one.save(one.chain(1, 2))
    one.settle()
    with one.store.states.lock:
        one.store.states.vacate(one.store.states.index.find(keys[1]), HOST)
    verified = threading.Event()
    monkeypatch.setattr(one.store.judgement, "verified", lambda *_: verified.set())
    work, fetched = fetching(one, keys)
    assert slow.begun.wait(60)
    assert verified.wait(60)
    assert one.store.forget(one.world, keys[:1]) == 1
    put_damaged(one, keys[0])
    slow.go.set()
    work.join(60)
    assert fetched[0].places == []
    assert one.store.release(fetched[0].lease)
    assert nothing_is_left_over(one)


def test_a_block_put_by_a_peer_is_served_once_it_was_hashed(rig) -> None:
    one = rig()
    header = header_of(one.world, one.chain(1, 1).keys[0])
    berths = one.store.berth([header])
    fill_record(berths[0].slot, header)
    one.store.adopt(berths)
    fetched = one.store.fetch(one.world, [header.key], 5.0)
    assert fetched.outcome is Outcome.OK
    assert one.store.release(fetched.lease)
    one.store.forget(one.world, [header.key])
    assert not one.store.states.unproven
