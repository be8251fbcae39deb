"""The save path: nobody sees half a block, and the first to commit a key wins."""

import pytest

from holdfast.errors import Outcome
from holdfast.policy.retention import Retention
from holdfast.store import evict
from holdfast.testing.memory import MemoryTier

MIB = 1 << 20


def test_reserved_blocks_are_invisible_until_committed(harness) -> None:
    one = harness()
    chain = one.chain(1, 3)
    reserved = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, reserved.places)
    assert one.store.cover(one.namespace, chain.keys).blocks == 0
    assert one.store.commit(reserved.ticket) == 3
    assert one.store.cover(one.namespace, chain.keys).blocks == 3


def test_held_blocks_need_no_slot(harness) -> None:
    one = harness()
    chain = one.chain(1, 4)
    one.save(chain, 0, 2)
    reserved = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    assert [place >= 0 for place in reserved.places] == [False, False, True, True]
    one.store.abort(reserved.ticket)


def test_the_first_commit_of_a_key_wins_and_the_second_slot_is_freed(harness) -> None:
    one = harness()
    chain = one.chain(1, 3)
    first = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    second = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, first.places)
    one.fill(chain.keys, second.places)
    assert one.store.commit(first.ticket) == 3
    assert one.store.commit(second.ticket) == 0
    assert one.read(chain) == 3
    assert one.view.used_slots(one.namespace) == 3


def test_a_ticket_commits_once(harness) -> None:
    one = harness()
    chain = one.chain(1, 2)
    reserved = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, reserved.places)
    assert one.store.commit(reserved.ticket) == 2
    assert one.store.commit(reserved.ticket) == 0


def test_aborted_slots_are_not_reused_before_their_rest_time(harness) -> None:
    one = harness(MIB)
    slots = one.view.slots(one.namespace)
    chain = one.chain(1, slots)
    reserved = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    assert len([place for place in reserved.places if place >= 0]) == slots
    one.store.abort(reserved.ticket, rest_s=10.0)
    other = one.chain(2, 1)
    refused = one.store.reserve(one.namespace, other.keys, other.fingerprint, 0)
    assert refused.outcome is Outcome.FULL
    assert refused.places == [-1]
    one.clock.advance(10.0)
    one.store.housekeep()
    assert one.save(other) == 1


def test_a_full_arena_without_a_lower_tier_evicts_the_oldest_blocks(harness) -> None:
    one = harness(MIB)
    old, new = one.chain(1, 40), one.chain(2, 40)
    one.save(old)
    one.save(new)
    assert one.read(new) == 40
    assert one.read(old) < 40


def test_blocks_that_no_lower_tier_accepts_can_be_evicted(harness) -> None:
    one = harness(MIB, MemoryTier(0))
    for seed in range(5):
        one.save(one.chain(seed, 40))
        one.flush()
    newest = one.chain(9, 40)
    one.save(newest)
    assert one.read(newest) == 40


def test_padding_contains_no_bytes_of_the_slots_previous_block(harness) -> None:
    one = harness(MIB)
    arena = one.store.arena(one.namespace.domain).view
    arena[:] = b"\xaa" * len(arena)
    chain = one.chain(1, 1)
    reserved = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, reserved.places)
    one.store.commit(reserved.ticket)
    place = reserved.places[0]
    end = place + 128 + one.namespace.raw_bytes + 16
    assert bytes(arena[end : place + one.namespace.slot_bytes]).count(0xAA) == 0


def test_a_key_committed_in_another_namespace_can_be_saved_in_its_own(harness) -> None:
    one = harness()
    chain, other = one.chain(1, 3), one.namespace._replace(fingerprint=b"l" * 16)
    early = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    one.fill(chain.keys, early.places)
    squat = one.store.reserve(other, chain.keys[1:2], chain.fingerprint, 1)
    one.fill(chain.keys[1:2], squat.places)
    assert one.store.commit(squat.ticket) == 1
    assert one.store.commit(early.ticket) == 3
    late = one.store.reserve(one.namespace, chain.keys, chain.fingerprint, 0)
    assert late.places == [-1, -1, -1]
    assert one.store.commit(late.ticket) == 0
    assert one.store.cover(one.namespace, chain.keys).blocks == 3
    assert one.store.cover(other, chain.keys[1:2]).blocks == 1
    assert one.view.used_slots(one.namespace) == 4


def test_blocks_that_claim_to_be_each_others_parents_can_leave_memory(harness) -> None:
    one = harness(2 * MIB)
    for seed in range(200):
        keys = one.chain(seed, 2).keys
        reserved = one.store.reserve(one.namespace, keys, keys[-1], 0)
        one.fill(keys, reserved.places)
        one.store.commit(reserved.ticket)
    honest = one.chain(999, 4)
    assert one.save(honest) == 4
    assert one.read(honest) == 4


def test_a_save_evicts_no_block_of_its_own_chain(harness) -> None:
    made = harness(64 << 10)
    slots = made.view.slots(made.namespace)
    chain = made.chain(1, slots + 2)
    assert made.save(chain, 0, slots) == slots
    reserved = made.store.reserve(made.namespace, chain.keys, chain.parent(0), 0)
    assert (reserved.places, reserved.outcome) == ([-1] * (slots + 2), Outcome.FULL)
    assert made.store.commit(reserved.ticket) == 0
    assert made.read(chain) == slots


def test_a_key_that_is_in_a_ticket_twice_takes_one_slot(harness) -> None:
    one = harness()
    chain = one.chain(1, 2)
    keys = [*chain.keys, chain.keys[0]]
    reserved = one.store.reserve(one.namespace, keys, chain.fingerprint, 0)
    one.fill(keys, reserved.places)
    assert one.store.commit(reserved.ticket) == 2
    assert one.read(chain) == 2
    assert one.view.used_slots(one.namespace) == 2
    assert one.view.used_bytes(0) == 2 * one.namespace.slot_bytes


def test_pinned_blocks_do_not_block_the_eviction_of_other_blocks(harness, monkeypatch) -> None:
    monkeypatch.setattr(evict, "_MAX_EXAMINED", 4)
    one = harness(4 * MIB)
    for seed in range(20):  # more than are looked at, and all of them older than the rest
        one.save(one.chain(seed, 1))
        assert one.store.pin(one.namespace, one.chain(seed, 1).keys, 3_600.0) == 1
    slots = one.view.slots(one.namespace)
    for seed in range(100, 100 + 2 * slots):
        assert one.save(one.chain(seed, 1)) == 1
    assert all(one.read(one.chain(seed, 1)) for seed in range(20))


def test_leased_blocks_are_moved_behind_other_eviction_candidates(harness, monkeypatch) -> None:
    monkeypatch.setattr(evict, "_MAX_LEASED_SKIPPED", 8)
    one = harness(4 * MIB)
    leased = [one.chain(seed, 1) for seed in range(20)]
    for each in leased:
        one.save(each)
        one.store.fetch(one.namespace, each.keys, 60.0)
    slots = one.view.slots(one.namespace)
    saved = sum(one.save(one.chain(seed, 1)) for seed in range(100, 100 + 2 * slots))
    assert saved >= 2 * slots - 20 // 8, "each scan puts eight behind the others"
    assert all(one.read(each) for each in leased)


@pytest.mark.parametrize("longer", [Retention.SESSION, Retention.DURABLE])
def test_a_block_saved_twice_at_once_gets_the_longer_retention(harness, longer) -> None:
    one = harness(2 * MIB, MemoryTier(64 * MIB))
    chain = one.chain(1, 4)
    both = [one.store.reserve(one.namespace, chain.keys, chain.parent(0), 0) for _ in range(2)]
    for reserved in both:
        one.fill(chain.keys, reserved.places)
    assert one.store.commit(both[0].ticket, Retention.EPHEMERAL) == 4
    assert one.store.commit(both[1].ticket, longer) == 0
    one.flush()
    assert one.tier.usage().records == 4


@pytest.mark.parametrize("writes_behind", [True, False])
@pytest.mark.parametrize("longer", [Retention.SESSION, Retention.DURABLE])
def test_an_ephemeral_block_saved_with_longer_retention_is_admitted_to_lower_tiers(
    harness, longer, writes_behind
) -> None:
    one = harness(2 * MIB, MemoryTier(64 * MIB), writes_behind=writes_behind)
    chain = one.chain(1, 4)
    one.save(chain, retention=Retention.EPHEMERAL)
    one.flush()
    assert one.tier.usage().records == 0
    with one.view.still():  # so that nothing is written before they are looked at
        assert one.save(chain, retention=longer) == 0
        assert all(one.view.is_admitted(one.namespace, key) for key in chain.keys)
        if writes_behind:
            assert not any(one.view.is_evictable(one.namespace, key) for key in chain.keys)
    one.flush()
    now = writes_behind or longer is Retention.DURABLE
    assert one.tier.usage().records == (4 if now else 0)
