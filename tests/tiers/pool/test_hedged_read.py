"""Hot segments have two copies: who is asked first, and who when that is late."""

import threading

import pytest

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.testing.payloads import namespace_of
from holdfast.tiers.base import TierGet, segment_place
from holdfast.tiers.pool import tier
from holdfast.tiers.pool.hot_segments import HOT_HITS
from holdfast.tiers.pool.segment_batch import segment_of
from holdfast.wire.remote.client import ReceivedRecords

NAMESPACE = namespace_of(8_000)


def test_a_hot_segment_gets_a_second_copy_and_outlives_its_owner(fleet) -> None:
    one = fleet()
    chain = one.chain(1, 4)
    one.write(chain)
    for _ in range(80):
        one.read(chain)
    one.write(chain)
    holders = [t for t in one.targets.values() if chain.keys[0] in t.records]
    assert len(holders) == 2
    holders[0].mood = "dead"
    assert set(one.read(chain)) == {Outcome.OK}


def test_a_fetch_counts_once_towards_a_hot_segment_for_any_number_of_batches(fleet):
    one = fleet()
    chain = one.chain(1, 512)
    one.write(chain)
    place = segment_place(chain.segment(0))
    gets = [
        TierGet(place, key, aligned_buffer(NAMESPACE.slot_bytes), NAMESPACE) for key in chain.keys
    ]
    for fetch in range(1, 62):
        for start in range(0, 512 if fetch < 3 else 4, 4):
            assert set(one.pool.read(gets[start : start + 4])) == {Outcome.OK}
        assert max(one.pool.hot._counts.values()).hits == fetch
        assert one.pool.hot.is_hot(segment_of(place)) == (fetch >= HOT_HITS)
    for _ in range(40):  # who is asked first of two owners is drawn
        one.pool.read(gets[-4:])
    misplaced = one.pool.misplaced(NAMESPACE, chain.keys)
    assert misplaced >= set(chain.keys[-4:]), "the rest of a hot segment is asked of both owners"
    assert max(one.pool.hot._counts.values()).hits == 61


def test_a_segment_written_before_it_was_hot_gets_its_second_copy(fleet, monkeypatch) -> None:
    for most in (tier.HEDGED_BYTES_MAX, 1):  # hedged, and one owner after the other
        monkeypatch.setattr(tier, "HEDGED_BYTES_MAX", most)
        one = fleet()
        chain = one.chain(1, 4)
        one.write(chain)
        misplaced = set()
        for _ in range(120):
            assert set(one.read(chain)) == {Outcome.OK}
            misplaced |= one.pool.misplaced(NAMESPACE, chain.keys)
        assert misplaced == set(chain.keys)
        one.write(chain)
        assert sum(chain.keys[0] in t.records for t in one.targets.values()) == 2
        for _ in range(40):
            one.read(chain)
        assert one.pool.misplaced(NAMESPACE, chain.keys) == set()


def hot(one):
    """Write a segment that is hot, and return its chain and the two targets that hold it."""
    chain = one.chain(1, 4)
    for _ in range(80):
        one.read(chain)
    one.write(chain)
    return chain, {name: t for name, t in one.targets.items() if chain.keys[0] in t.records}


def test_a_substitute_for_one_of_two_owners_is_not_asked_first(fleet, monkeypatch) -> None:
    one = fleet()
    monkeypatch.setattr(one.pool.health, "hedge_after_s", lambda: None)  # nobody is asked second
    chain, owners = hot(one)
    assert len(owners) == 2
    dead, alive = owners
    one.targets[dead].mood = "dead"
    for _ in range(20):
        one.read(chain)
    assert not one.pool.health.trusted(dead)
    before = {name: target.calls for name, target in one.targets.items()}
    for _ in range(40):
        assert set(one.read(chain)) == {Outcome.OK}
    asked = {name for name, target in one.targets.items() if target.calls > before[name]}
    assert asked == {alive}


def test_an_owner_that_answered_a_hedged_read_is_not_asked_again(fleet) -> None:
    one = fleet()
    chain, owners = hot(one)
    empty, full = owners
    one.targets[empty].records.clear()
    before = {name: one.targets[name].calls for name in owners}
    for _ in range(40):
        assert set(one.read(chain)) == {Outcome.OK}
    assert one.targets[empty].calls - before[empty] <= 40
    assert one.targets[full].calls - before[full] <= 40 + one.pool.hedged_reads.hedging.hedges


def test_a_read_too_large_to_hedge_goes_directly_into_the_callers_memory(fleet, monkeypatch):
    one = fleet()
    chain, _ = hot(one)
    monkeypatch.setattr(tier, "HEDGED_BYTES_MAX", NAMESPACE.slot_bytes)
    before = one.pool.hedged_reads.hedging.requests
    assert set(one.read(chain)) == {Outcome.OK}
    assert one.pool.hedged_reads.hedging.requests == before


@pytest.mark.parametrize(
    ("answered", "outcome"),
    [
        (Outcome.GONE, Outcome.GONE),
        (Outcome.LATE, Outcome.LATE),
        (Outcome.UNSENT, Outcome.LATE),
        (Outcome.MISS, Outcome.MISS),
    ],
)
def test_a_hedged_read_that_fails_at_both_owners_is_not_reported_as_a_miss(
    fleet, monkeypatch, answered, outcome
):
    one = fleet(2)
    chain, owners = hot(one)
    monkeypatch.setattr(one.pool.health, "hedge_after_s", lambda: 0.0)
    monkeypatch.setattr(one.pool.hedged_reads.hedging, "take", lambda: True)
    both = threading.Barrier(2, timeout=60)

    def refuse(*_):
        both.wait()  # neither answers before the other is asked
        return ReceivedRecords(0, answered)

    for target in owners.values():
        monkeypatch.setattr(target, "get", refuse)
    assert one.read(chain) == [outcome] * 4


@pytest.mark.parametrize("answered", [Outcome.GONE, Outcome.LATE])
def test_blocks_are_not_misplaced_if_the_other_owner_did_not_answer(fleet, monkeypatch, answered):
    one = fleet()
    chain, owners = hot(one)
    one.pool.misplaced(NAMESPACE, chain.keys)
    failing = next(iter(owners))
    monkeypatch.setattr(one.pool.health, "hedge_after_s", lambda: None)
    monkeypatch.setattr(one.pool.health, "choose", lambda _: failing)
    monkeypatch.setattr(owners[failing], "get", lambda *_: ReceivedRecords(0, answered))
    assert one.read(chain) == [Outcome.OK] * 4
    assert one.pool.misplaced(NAMESPACE, chain.keys) == set()


def test_a_late_read_is_overtaken_by_a_hedged_read_within_the_budget(fleet, monkeypatch) -> None:
    one = fleet()
    chain, owners = hot(one)
    for _ in range(200):  # so that the usual time of an answer is known
        one.read(chain)
    slow, hedging, go = next(iter(owners)), one.pool.hedged_reads.hedging, threading.Event()
    get = owners[slow].get
    monkeypatch.setattr(one.pool.health, "choose", lambda _: slow)
    monkeypatch.setattr(owners[slow], "get", lambda *call: get(*call) if go.wait(60) else None)
    hedging._saved_percent, before = 100, hedging.hedges
    try:
        assert one.read(chain) == [Outcome.OK] * 4  # while the first owner has not answered
        assert not go.is_set()
    finally:
        go.set()
    assert hedging.hedges == before + 1
