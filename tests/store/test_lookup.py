"""Coverage asks shared tiers about what the index does not know, and hearsay may be wrong."""

import math
import threading

import pytest

from holdfast.errors import Outcome
from holdfast.store import lookup, remote_lookups
from holdfast.store.estimates import EngineId
from holdfast.store.lookup import LOOK_S, LookupResult, PromptTokens
from holdfast.testing.memory import SharedMemoryTier
from holdfast.tiers.base import segment_place

MIB = 1 << 20
ENGINE = EngineId("test", "f")


class Timed(SharedMemoryTier):
    """A shared tier that takes as long as it may, on a clock of the test's."""

    def __init__(self, clock, name):
        super().__init__({}, name)
        self.clock, self.told, self.there = clock, [], True

    def held(self, namespace, keys, start, within_s=math.inf):
        self.told.append(within_s)
        self.clock.now_s += min(within_s, 0.7)
        return super().held(namespace, keys, start, within_s)

    def misplaced(self, namespace, keys):
        return set()

    def lost(self):
        return None

    def reachable(self):
        return self.there


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def other_saved(harness):
    """Return what a shared tier holds, a store over it, and the chain that another one saved."""
    by_key = {}
    one, other = (harness(MIB, SharedMemoryTier(by_key, "pool")) for _ in range(2))
    chain = one.chain(1, 10)
    one.save(chain)
    one.flush()
    return by_key, other, chain


def test_a_context_saved_by_one_store_is_found_and_fetched_by_another(other_saved) -> None:
    _, other, chain = other_saved
    assert other.store.cover(other.namespace, chain.keys).blocks == 0
    assert other.store.look(other.namespace, chain.keys, 60.0).sources == {"pool": 10}
    assert other.read(chain) == 10
    assert other.store.cover(other.namespace, chain.keys).sources == {"host": 10}


def test_blocks_are_written_to_the_place_of_their_segment(harness) -> None:
    by_key = {}
    one = harness(MIB, SharedMemoryTier(by_key, "pool"))
    chain = one.chain(1, 10)
    one.save(chain, 0, 4)
    reserved = one.store.reserve(
        one.namespace, chain.keys[4:], chain.parent(4), 4, chain.segment(4)
    )
    one.fill(chain.keys[4:], reserved.places)
    one.store.commit(reserved.ticket)
    one.flush()
    assert {place for place, _ in by_key.values()} == {segment_place(chain.segment(0))}
    assert len(by_key) == 10


def test_a_stale_remote_lookup_is_a_miss_and_is_forgotten(other_saved) -> None:
    by_key, other, chain = other_saved
    other.store.look(other.namespace, chain.keys, 60.0)
    del by_key[other.namespace, chain.keys[6]]
    assert other.read(chain) == 6
    assert other.store.cover(other.namespace, chain.keys).blocks == 6


def test_a_damaged_record_is_deleted_by_its_first_reader_and_written_again(other_saved) -> None:
    by_key, other, chain = other_saved
    place, record = by_key[other.namespace, chain.keys[6]]
    by_key[other.namespace, chain.keys[6]] = (
        place,
        record[:5_000] + bytes([record[5_000] ^ 1]) + record[5_001:],
    )
    other.store.look(other.namespace, chain.keys, 60.0)
    assert other.read(chain) == 6
    assert (other.namespace, chain.keys[6]) not in by_key
    other.save(chain)
    other.flush()
    assert by_key[other.namespace, chain.keys[6]] == (place, record)


def test_the_number_of_cached_remote_lookups_is_bounded(other_saved, monkeypatch) -> None:
    monkeypatch.setattr(remote_lookups, "MAX_CACHED_LOOKUPS", 5)
    _, other, chain = other_saved
    other.store.look(other.namespace, chain.keys, 60.0)
    assert other.view.remote_lookups == 5
    assert other.store.cover(other.namespace, chain.keys).blocks == 5


def test_lookups_cached_for_two_shared_tiers_are_forgotten_block_by_block(
    harness, monkeypatch
) -> None:
    monkeypatch.setattr(remote_lookups, "MAX_CACHED_LOOKUPS", 5)
    one = harness(MIB, SharedMemoryTier({}, "pool"), SharedMemoryTier({}, "valkey"))
    one.save(one.chain(1, 8))
    one.leave_memory()
    assert one.view.remote_lookups == 8
    one.store.housekeep()
    assert one.view.remote_lookups == 5
    assert one.store.status().blocks == 5


def test_blocks_written_to_a_shared_tier_and_evicted_count_as_remote_lookups(
    harness, monkeypatch
) -> None:
    monkeypatch.setattr(remote_lookups, "MAX_CACHED_LOOKUPS", 20)
    by_key = {}
    one = harness(MIB, SharedMemoryTier(by_key, "pool"))
    for seed in range(40):
        chain = one.chain(seed, 10)
        one.save(chain)
        one.flush_writes()
        one.store.housekeep()
    in_memory = one.view.used_slots(one.namespace)
    assert len(by_key) > 2 * in_memory
    assert one.store.status().blocks <= in_memory + 20, "what others may drop is not counted on"
    assert one.store.look(one.namespace, one.chain(0, 10).keys, 60.0).blocks == 10
    assert one.read(one.chain(0, 10)) == 10


def test_a_lookup_with_an_unexpected_tier_error_still_covers_blocks_held_here(
    harness, caplog
) -> None:
    class Broken(SharedMemoryTier):
        def held(self, *_):
            raise ZeroDivisionError

    one = harness(MIB, Broken({}, "pool"))
    chain = one.chain(1, 5)
    one.save(chain, 0, 3)
    assert one.store.look(one.namespace, chain.keys, 60.0).blocks == 3
    assert "tier pool: held() raised ZeroDivisionError()" in caplog.text
    assert one.save(chain) == 2


def test_a_store_without_a_shared_tier_sends_no_lookup(harness) -> None:
    one = harness(MIB)
    chain = one.chain(1, 3)
    one.save(chain, 0, 2)
    assert not one.store.asks(one.namespace, chain.keys)
    assert one.store.look(one.namespace, chain.keys, 60.0).blocks == 2


def test_lookups_of_several_tiers_share_one_deadline(harness, monkeypatch) -> None:
    monkeypatch.setattr(lookup, "time", clock := Clock())
    tiers = [Timed(clock, f"pool {number}") for number in range(3)]
    one = harness(MIB, *tiers)
    one.store.look(one.namespace, one.chain(1, 3).keys)
    assert tiers[0].told == [LOOK_S]
    assert tiers[1].told == [pytest.approx(LOOK_S - 0.7)]
    assert tiers[2].told == [], "the time was over"
    assert clock.now_s <= LOOK_S


class SilentTier(SharedMemoryTier):
    """Answers no lookup before it is told to."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked, self.answers = threading.Event(), threading.Event()

    def held(self, *args):
        self.asked.set()
        assert self.answers.wait(60)
        return super().held(*args)


def test_a_lookup_that_waits_for_another_in_flight_ends_at_its_own_deadline(harness) -> None:
    one = harness(MIB, silent := SilentTier({}, "pool"))
    chain = one.chain(1, 3)
    first = threading.Thread(target=one.store.look, args=(one.namespace, chain.keys, 60.0))
    first.start()
    assert silent.asked.wait(60)
    found = one.store.look(one.namespace, chain.keys, 0.01)
    assert (found.blocks, found.unanswered) == (0, {"pool": Outcome.LATE})
    silent.answers.set()
    first.join(60)


def looked_at_once(other, monkeypatch, first, second):
    """Look up two chains, the second while the first is asked about; return results, questions."""
    waits, wait, held = threading.Event(), lookup.wait, other.tier.held
    results, asked = {}, []

    def look(which, keys):
        results[which] = other.store.look(other.namespace, keys, 60.0)

    waiting = threading.Thread(target=look, args=("second", second))

    def noted_wait(*args, **named):
        waits.set()
        return wait(*args, **named)

    def held_once_another_waits(*args):
        asked.append(args)
        if len(asked) == 1:
            waiting.start()
            assert waits.wait(60)
        return held(*args)

    monkeypatch.setattr(lookup, "wait", noted_wait)
    monkeypatch.setattr(other.tier, "held", held_once_another_waits)
    look("first", first)
    waiting.join(60)
    return results, len(asked)


def test_a_lookup_that_waited_for_a_shorter_chain_asks_about_the_rest(other_saved, monkeypatch):
    _, other, chain = other_saved
    results, asked = looked_at_once(other, monkeypatch, chain.keys[:4], chain.keys)
    assert results["first"].blocks == 4
    assert results["second"] == LookupResult(10, {"pool": 10}, {})
    assert asked == 2


def test_a_lookup_that_waited_for_an_equal_chain_asks_nothing(other_saved, monkeypatch):
    _, other, chain = other_saved
    longer = other.chain(1, 14).keys
    assert longer[:10] == chain.keys
    results, asked = looked_at_once(other, monkeypatch, longer, longer)
    assert [found.blocks for found in results.values()] == [10, 10]
    assert asked == 1


def test_a_plan_request_for_an_empty_prompt_is_answered_and_not_logged(harness) -> None:
    one = harness(MIB, SharedMemoryTier({}, "pool"))
    chain = one.chain(1, 3)
    one.save(chain)
    found = one.store.plan_fetch(one.namespace, chain.keys, PromptTokens(ENGINE, 0, 0, 60.0))
    assert (found.held, found.plan.blocks, found.number) == (3, 3, 0)
    assert one.store.plans().plans == []


def test_an_unreachable_pool_is_not_asked_and_not_in_the_plan(harness) -> None:
    one = harness(MIB, tier := Timed(Clock(), "pool"))
    other = harness(MIB, again := Timed(Clock(), "pool"))
    again.records = tier.records
    chain = one.chain(1, 10)
    one.save(chain)
    one.flush()
    other.save(chain, 0, 4)
    other.store.look(other.namespace, chain.keys, 60.0)
    prompt = PromptTokens(ENGINE, 0, 0, 60.0)
    assert other.store.plan_fetch(other.namespace, chain.keys, prompt).held == 10
    again.there, told = False, len(again.told)
    assert other.store.plan_fetch(other.namespace, chain.keys, prompt).held == 4
    longer = one.chain(1, 20)
    assert longer.keys[:10] == chain.keys
    assert not other.store.asks(other.namespace, longer.keys)
    assert other.store.look(other.namespace, longer.keys, 60.0).blocks == 10
    assert len(again.told) == told
    again.there = True
    assert other.store.plan_fetch(other.namespace, chain.keys, prompt).held == 10
