"""The read path: what was saved comes back byte for byte, or is named missing."""

import pytest

from holdfast.errors import Outcome
from holdfast.store import fetch as fetch_path
from holdfast.store.core import StoreParts
from holdfast.testing.memory import MemoryTier
from holdfast.testing.store_control import expire_leases

MIB = 1 << 20


def test_saved_blocks_are_fetched(harness) -> None:
    one = harness()
    chain = one.chain(1, 10)
    assert one.save(chain) == 10
    assert one.read(chain) == 10


def test_a_fetch_of_a_longer_context_returns_its_held_prefix(harness) -> None:
    one = harness()
    chain = one.chain(1, 10)
    one.save(chain, 0, 6)
    assert one.store.cover(one.namespace, chain.keys).blocks == 6
    assert one.read(chain) == 6


def test_a_fetch_of_a_context_that_is_not_held_is_a_miss(harness) -> None:
    one = harness()
    fetched = one.store.fetch(one.namespace, one.chain(1, 3).keys, 1.0)
    assert fetched.places == []
    assert fetched.outcome is Outcome.MISS


def test_a_fetch_with_a_zero_deadline_is_late_and_copies_nothing(harness) -> None:
    one = harness()
    chain = one.chain(1, 4)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 0.0)
    assert fetched.places == []
    assert fetched.outcome is Outcome.LATE
    assert "deadline" in fetched.reason


def test_blocks_demoted_to_the_tier_below_are_promoted_again(harness) -> None:
    one = harness(MIB, MemoryTier(64 * MIB))
    chains = [one.chain(seed, 20) for seed in range(6)]
    for chain in chains:
        for start in range(0, 20, 5):
            one.save(chain, start, start + 5)
            one.flush()
    covered = one.store.cover(one.namespace, chains[0].keys)
    assert covered.blocks == 20
    assert covered.sources.get("memory", 0) > 0
    for chain in chains:
        assert one.read(chain) == 20
    assert one.store.cover(one.namespace, chains[-1].keys).sources == {"host": 20}


def test_the_reason_says_how_many_blocks_arrived_if_not_all_did(harness, monkeypatch) -> None:
    one = harness(MIB, MemoryTier(64 * MIB))
    chain = one.chain(1, 4)
    one.save(chain)
    one.leave_memory(chain)
    monkeypatch.setattr(one.tier, "read", lambda batch: [Outcome.GONE] * len(batch))
    fetched = one.store.fetch(one.namespace, chain.keys, 60.0)
    assert (fetched.places, fetched.outcome) == ([], Outcome.GONE)
    assert fetched.reason == "fetch all 4 blocks held; 0 arrived"


def test_a_fetch_of_a_chain_longer_than_the_arena_returns_the_blocks_that_fit(harness) -> None:
    one = harness(MIB, MemoryTier(64 * MIB))
    chain = one.chain(1, 100)
    for start in range(0, 100, 5):
        one.save(chain, start, start + 5)
        one.flush()
    landed = one.read(chain)
    assert 0 < landed <= one.view.slots(one.namespace)


def test_a_leased_block_is_never_evicted_while_it_is_read(harness) -> None:
    one = harness(MIB)
    chain = one.chain(1, 10)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    arena = one.store.arena(one.namespace.domain).view
    before = [bytes(arena[place : place + one.namespace.slot_bytes]) for place in fetched.places]
    for seed in range(2, 30):
        one.save(one.chain(seed, 10))
    after = [bytes(arena[place : place + one.namespace.slot_bytes]) for place in fetched.places]
    assert before == after
    assert one.store.release(fetched.lease)


def test_releasing_an_expired_lease_reports_that_it_has_ended(harness) -> None:
    one = harness()
    chain = one.chain(1, 3)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    one.clock.advance(1.0 + one.store.options.lease_s)
    one.store.housekeep()
    assert not one.store.release(fetched.lease)


@pytest.mark.parametrize("offset", [0, 5, 17, 40, 70, 90, 100, 127, 128, 5000, 128 + (16 << 10)])
def test_a_flipped_byte_in_the_arena_is_never_served_and_the_next_save_repairs_it(
    harness, offset: int
) -> None:
    one = harness()
    chain = one.chain(1, 5)
    one.save(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 1.0)
    one.store.release(fetched.lease)
    one.store.arena(one.namespace.domain).view[fetched.places[2] + offset] ^= 0x40
    again = one.store.fetch(one.namespace, chain.keys, 1.0)
    assert len(again.places) == 2
    assert again.outcome in (Outcome.CORRUPT, Outcome.MISS)
    one.store.release(again.lease)
    assert one.store.status().faults[-1].tier == "host"
    assert one.save(chain) == 1
    assert one.read(chain) == 5


def test_two_blocks_swapped_below_are_a_miss(harness) -> None:
    records = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, 4)
    one.save(chain)
    one.flush()
    places = sorted(records)
    records[places[1]], records[places[2]] = records[places[2]], records[places[1]]
    one.leave_memory()
    assert one.read(chain) == 1


def test_a_corrupt_slot_is_not_reused_while_it_is_leased(harness) -> None:
    one = harness(MIB)
    chain = one.chain(1, 3)
    one.save(chain)
    reader = one.store.fetch(one.namespace, chain.keys, 1.0)
    one.store.arena(one.namespace.domain).view[reader.places[0] + 500] ^= 1
    second = one.store.fetch(one.namespace, chain.keys, 1.0)
    assert second.places == []
    one.store.release(second.lease)
    reserved = one.store.reserve(one.namespace, one.chain(2, 50).keys, b"f" * 16, 0)
    assert reader.places[0] not in reserved.places
    one.store.abort(reserved.ticket)
    one.store.release(reader.lease)
    taken = one.store.reserve(one.namespace, one.chain(3, 61).keys, b"f" * 16, 0)
    assert reader.places[0] in taken.places


@pytest.mark.parametrize("place", ["host", "memory"])
def test_a_lease_for_a_peer_does_not_expire_before_its_release(harness, place) -> None:
    """A peer may take its time; what an engine fetches it must copy within the lease."""
    one = harness(tier=MemoryTier(4 * MIB))
    chain = one.chain(1, 4)
    one.save(chain)
    one.flush()
    if place == "memory":
        one.leave_memory()
    lent = one.store.fetch_unverified(one.namespace, chain.keys, 60.0)
    assert lent.sources == {place: 4}
    fetched = one.store.fetch(one.namespace, chain.keys, 60.0)
    one.clock.advance(1e6)
    expire_leases(one.store)
    assert not one.store.release(fetched.lease)
    assert one.store.release(lent.lease)
    assert not one.store.status().leases


class RaisingTier(MemoryTier):
    """Reads end in an error, as no tier's should, until told otherwise."""

    broken = True

    def read(self, batch):
        if self.broken:
            raise RuntimeError("read failed")
        return super().read(batch)


def test_an_exception_of_a_tier_is_a_miss_and_reaches_no_caller(harness) -> None:
    one = harness(2 * MIB, RaisingTier(64 * MIB))
    chain = one.chain(1, 20)
    one.save(chain)
    one.leave_memory(chain)
    fetched = one.store.fetch(one.namespace, chain.keys, 60.0)
    assert (fetched.places, fetched.outcome) == ([], Outcome.GONE)
    assert one.store.release(fetched.lease)
    assert one.nothing_is_left_over()
    one.tier.broken = False
    assert one.save(chain) == 20, "what could not be read can be saved to memory"
    one.leave_memory(chain)
    assert one.read(chain) == 20


def test_a_fetch_that_runs_during_a_close_reads_no_lower_tier_and_leaks_no_slot(harness) -> None:
    one = harness(2 * MIB, MemoryTier(64 * MIB))
    chain, here = one.chain(1, 20), one.chain(2, 3)
    one.save(chain)
    one.leave_memory(chain)
    one.save(here)
    one.store.close()
    assert one.store.fetch(one.namespace, here.keys, 60.0).outcome is Outcome.GONE
    begun = fetch_path.fetch(
        one.store, one.namespace, chain.keys, 5.0
    )  # not looked at: it had begun
    assert begun.places == []
    assert StoreParts.release(one.store, begun.lease)
    assert one.nothing_is_left_over()
    assert one.view.used_slots(one.namespace) == 3
