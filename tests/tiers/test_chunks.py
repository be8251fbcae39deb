"""Chunks that engines have page-locked keep their memory, and the budget goes on counting them."""

import os

import pytest

from holdfast.tiers.base import NOWHERE, Place
from holdfast.tiers.chunks import HostBudget
from holdfast.tiers.host import HostTier

MIB = 1 << 20
CHUNK = MIB
RECORD = 256 << 10


class Holder:
    """A session that locks chunks and notes what it is asked for."""

    def __init__(self, name="engine"):
        self.engine, self.failure = name, ""
        self.asked = []

    def recall(self, chunks):
        self.asked += chunks


def resident(tier):
    return os.fstat(tier.arena.fd).st_blocks * 512


def fill(tier, size=RECORD, count=1 << 30):
    places = []
    while len(places) < count and (place := tier.reserve([size]).places[0]) != NOWHERE:
        tier.view(place, size)[:] = b"x" * size
        places.append(place)
    return places


def lock_all(tier, holder, now_s=0.0, most=1 << 20):
    granted = tier.lock(range(1 << 10), holder, most, now_s)
    tier.populate(granted)
    return granted


@pytest.fixture
def pair():
    """Two tiers of 16 chunks of 1 MiB together, each slot 256 KiB, a run 2 chunks."""
    budget = HostBudget(16 * MIB)
    tiers = HostTier(budget), HostTier(budget)
    yield tiers
    for tier in tiers:
        tier.close()


def test_only_chunks_in_use_can_be_locked_and_no_more_than_the_limit(pair):
    one, _ = pair
    holder = Holder()
    fill(one, count=8)
    one.prefault()
    assert one.lock([0, 1, 2, 3, 99, -1], holder, 100, 0.0) == [0, 1]
    fill(one, count=8)
    assert one.lock([0, 2, 3], Holder(), 3, 0.0) == [0], "a locked chunk binds its whole run"
    assert one.lock([2], Holder(), 4, 0.0) == [2]
    assert one.lock_usage()[:2] == (3, 4)
    assert one.locked_by(holder) == [0, 1]


def test_a_locked_chunk_keeps_its_memory_and_its_bytes_when_its_run_closes(pair):
    one, other = pair
    holder, places = Holder(), fill(one)
    assert lock_all(one, holder) == list(range(16))
    before = resident(one)
    one.free(places)
    assert resident(one) == before == 16 * MIB
    assert bytes(one.view(places[0], RECORD)) == b"x" * RECORD
    assert one.lock_usage().kept == 16
    assert other.reserve([RECORD]).places == [NOWHERE], "kept chunks are counted"
    assert one.reclaim() == 0
    assert resident(one) == before


def test_kept_chunks_serve_the_next_run_of_their_arena_whatever_its_slots(pair):
    one, _ = pair
    holder, places = Holder(), fill(one)
    lock_all(one, holder)
    one.free(places)
    again = fill(one, MIB)
    assert len(again) == one.slots(MIB) == 16
    assert one.lock_usage() == (16, 16, 0, 0, 0)
    assert one.locked_by(holder) == list(range(16))


def test_a_run_takes_kept_chunks_before_free_ones(pair):
    one, other = pair
    first, second = fill(one, count=8), fill(one, count=8)
    one.lock([2, 3], Holder(), 100, 0.0)
    one.free(second)
    one.free(first)
    assert len(fill(other)) == 4 * 14
    (place,) = one.reserve([RECORD]).places
    assert place // CHUNK == 2


def test_a_run_takes_kept_chunks_and_the_last_free_ones_together(pair):
    one, other = pair
    places = fill(one, count=8)
    one.lock([1], Holder(), 100, 0.0)
    one.free(places)
    fill(other, count=4 * 14)
    assert len(fill(one)) == 8, "chunks 0 or 2 from the budget, and chunk 1"


def test_the_last_unlock_returns_a_kept_chunk_to_the_kernel_and_to_the_budget(pair):
    one, other = pair
    holders, places = [Holder("a"), Holder("b")], fill(one)
    for holder in holders:
        lock_all(one, holder)
    one.free(places)
    assert one.unlock(range(16), holders[0], 0.0) == 16
    assert one.unlock(range(16), holders[0], 0.0) == 0, "no lock is ended twice"
    assert other.reserve([RECORD]).places == [NOWHERE]
    assert one.unlock(range(4), holders[1], 0.0) == 4
    assert resident(one) == 12 * MIB
    assert len(fill(other)) == 16
    assert one.unlock(one.locked_by(holders[1]), holders[1], 0.0) == 12
    assert resident(one) == 0
    assert len(fill(other)) == 48


def test_prefault_leaves_locked_and_kept_chunks_alone(pair):
    one, other = pair
    places = fill(one)
    lock_all(one, Holder())
    one.free(places[8:])
    while one.prefault() or other.prefault():
        pass
    assert resident(one) == 16 * MIB
    assert resident(other) == 0
    assert bytes(one.view(places[-1], RECORD)) == b"x" * RECORD


def test_a_recalled_run_takes_no_new_slot_and_its_blocks_stay_readable(pair):
    one, _ = pair
    holder, places = Holder(), fill(one, count=8)
    lock_all(one, holder)
    one.free(places[:4])
    assert one.recall(places[7]) == 2
    assert one.recall(places[7]) == 0, "asked for once"
    assert holder.asked == [0, 1]
    (elsewhere,) = one.reserve([RECORD]).places
    assert elsewhere // CHUNK > 1
    one.free([places[4]])
    assert one.reserve([RECORD]).places[0] // CHUNK > 1
    assert bytes(one.view(places[5], RECORD)) == b"x" * RECORD
    one.unlock([0, 1], holder, 0.0)
    assert one.reserve([RECORD]).places[0] // CHUNK <= 1, "unlocked, it is like any other run"


def test_a_chunk_that_was_recalled_is_not_locked_again_at_once(pair):
    one, _ = pair
    holder, places = Holder(), fill(one, count=8)
    lock_all(one, holder)
    one.recall(places[0])
    assert one.lock([0], Holder("other"), 100, 1.0) == []
    one.unlock([0, 1], holder, 1.0)
    assert one.lock([0, 1], holder, 100, 2.0) == []
    assert one.lock([0, 1], holder, 100, 60.0) == [0, 1]
    assert one.lock([0, 1], holder, 100, 60.0) == [], "it has them"
    assert one.lock([0, 1], Holder(), 100, 60.0) == [0, 1]


def test_recalled_kept_chunks_are_not_used_again_and_leave_with_their_lock(pair):
    one, other = pair
    holder, places = Holder(), fill(one)
    lock_all(one, holder)
    one.free(places)
    assert one.recall_kept(4) == 4
    assert holder.asked == [0, 1, 2, 3]
    assert len(fill(one)) == 48
    one.unlock([0, 1, 2, 3], holder, 0.0)
    assert len(fill(other)) == 16


def test_an_erased_domain_leaves_zeros_in_kept_chunks(pair):
    one, _ = pair
    places = fill(one)
    lock_all(one, Holder())
    one.free(places[:32])
    one.erase()
    one.free(places[32:])
    one.clear_erased()
    assert bytes(one.arena.view) == bytes(16 * MIB)
    assert resident(one) == 16 * MIB
    assert len(fill(one)) == 64, "cleared chunks are used again"


def test_a_chunk_unlocked_while_it_is_overwritten_is_overwritten_and_released_once(pair):
    one, _ = pair
    holder, places = Holder(), fill(one, count=4)
    assert lock_all(one, holder) == [0, 1]
    one.free(places)
    clear, cleared = one.arena.clear, []

    def unlocked_and_erased_meanwhile(offset, nbytes):
        clear(offset, nbytes)
        cleared.append(offset // CHUNK)
        if len(cleared) == 1:
            one.unlock([0, 1], holder, 0.0)
            with one._lock:
                one._chunks.erase_kept()

    one.arena.clear = unlocked_and_erased_meanwhile
    one.erase()
    assert len(cleared) == 1, "a run may have the chunk when it is overwritten again"
    assert one._budget.free_chunks == 16


def test_a_run_opened_after_an_erasure_keeps_its_bytes_when_it_closes(pair):
    one, _ = pair
    lock_all(one, Holder())
    one.erase()
    places = fill(one, count=8)
    lock_all(one, Holder())
    one.free(places)
    one.clear_erased()
    assert bytes(one.view(Place(0), 8)) == b"x" * 8, "nothing was erased since"


def test_slots_of_an_owner_are_in_runs_of_its_own_until_memory_is_full(pair):
    one, _ = pair
    places = {1: [], 2: []}
    for _ in range(16):
        for owner, mine in places.items():
            mine.extend(one.reserve([RECORD], owner).places)
    chunks = [{place // CHUNK for place in mine} for mine in places.values()]
    assert not chunks[0] & chunks[1]
    shared = fill(one)
    assert len(shared) == 64 - 32
    one.free(places[2][:1])
    assert one.reserve([RECORD], 1).places == places[2][:1], "a slot of another owner, not none"
    assert one.reserve([RECORD], 1).places == [NOWHERE]
