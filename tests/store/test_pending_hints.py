"""What is known of sessions is bounded, and the one used longest ago is forgotten first."""

from collections.abc import Callable

from holdfast.blocks.namespace import Namespace
from holdfast.plan.prestage import BEGUN_S, LATE_S, PrestageTimes
from holdfast.status import HintStatus
from holdfast.store import pending_hints
from holdfast.store.pending_hints import (
    KeptLimit,
    NamedChain,
    PendingHints,
    PendingPrestage,
    PinnedChain,
)

NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 4096, 16)
OTHER = NAMESPACE._replace(domain=b"o" * 16)
THIRD = NAMESPACE._replace(domain=b"t" * 16)
MOST = 1 << 20


def limit(nbytes: int = MOST, *, is_shared: bool = False) -> Callable[[bytes], KeptLimit]:
    """Return what returns this limit for every domain."""
    return lambda _: KeptLimit(nbytes, is_shared)


def test_the_least_recently_used_session_is_forgotten_first(monkeypatch) -> None:
    monkeypatch.setattr(pending_hints, "KEYS_BYTES_MAX", 64)
    known = PendingHints()
    for name in ("a", "b", "a", "c"):
        known.follow(NAMESPACE, name, [b"k" * 16, b"l" * 16])
    assert known.chain(NAMESPACE.domain, "b") is None
    assert known.chain(NAMESPACE.domain, "a").keys == b"k" * 16 + b"l" * 16
    known.forget(NAMESPACE.domain, "a")
    known.forget(NAMESPACE.domain, "a")
    assert known.status(0.0) == HintStatus(sessions=1)


def test_a_domain_with_many_sessions_does_not_push_out_those_of_another(monkeypatch) -> None:
    monkeypatch.setattr(pending_hints, "SESSIONS_MAX", 4)
    known = PendingHints()
    known.follow(OTHER, "other", [b"k" * 16])
    for number in range(9):
        known.follow(NAMESPACE, f"flood {number}", [b"k" * 16])
    assert known.chain(OTHER.domain, "other") is not None
    kept = [known.chain(NAMESPACE.domain, f"flood {number}") is not None for number in range(9)]
    assert kept == [False] * 6 + [True] * 3


def test_a_domain_with_long_sessions_does_not_push_out_those_of_another(monkeypatch) -> None:
    monkeypatch.setattr(pending_hints, "KEYS_BYTES_MAX", 160)
    known = PendingHints()
    known.follow(OTHER, "other", [b"k" * 16])
    for name in ("a", "b", "c"):
        known.follow(NAMESPACE, name, [b"k" * 16] * 4)
    assert known.chain(OTHER.domain, "other") is not None
    kept = [known.chain(NAMESPACE.domain, name) is not None for name in ("a", "b", "c")]
    assert kept == [False, True, True]


def test_due_prestages_are_returned_in_order_of_time() -> None:
    known = PendingHints()
    chains = [
        PendingPrestage(NamedChain(NAMESPACE, bytes([i]) * 16), PrestageTimes(9.0))
        for i in range(3)
    ]
    for at_s, chain in zip((3.0, 1.0, 2.0), chains, strict=True):
        assert known.wait(at_s, chain)
    assert known.due(2.5, limit()) == [chains[1], chains[2]]
    assert known.due(2.5, limit()) == []
    assert known.due(3.0, limit()) == [chains[0]]


def test_pins_count_until_they_end() -> None:
    known = PendingHints()
    known.pin(NAMESPACE, b"a", pending_hints.PinnedChain(10.0, 100, 1))
    known.pin(NAMESPACE, b"b", pending_hints.PinnedChain(20.0, 10, 2))
    assert [known.pinned_bytes(at_s) for at_s in (0.0, 10.0, 20.0)] == [110, 10, 0]


def test_pending_and_running_prestages_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(pending_hints, "KEYS_BYTES_MAX", 320)
    monkeypatch.setattr(pending_hints, "BEGUN_MAX", 2)
    known = PendingHints()
    stagings = [staging_of(seed, 2) for seed in range(6)]
    assert [known.wait(1.0, staging) for staging in stagings] == [True] * 5 + [False]
    assert known.due(2.0, limit()) == stagings[:2]
    assert known.due(2.0, limit()) == []
    assert known.wait(1.0, stagings[5]), "what has begun waits no longer"
    known.done(stagings[0])
    assert known.due(2.0, limit()) == stagings[2:3]
    other = NAMESPACE._replace(domain=b"o" * 16)
    later = PendingPrestage(NamedChain(other, b"k" * 32), PrestageTimes(9.0))
    assert known.wait(1.5, later)
    assert known.due(2.0, limit()) == [later], "another domain's does not wait for them"


def test_claimed_bytes_count_as_pinned_until_the_pin_is_made() -> None:
    known = PendingHints()
    known.claim(NAMESPACE.domain, 100)
    known.claim(NAMESPACE.domain, 50)
    assert known.kept_bytes(0.0).total() == 150
    known.pin(NAMESPACE, b"a", pending_hints.PinnedChain(20.0, 30, 1))
    known.end_claim(NAMESPACE.domain, 100)
    known.end_claim(NAMESPACE.domain, 50)
    assert known.kept_bytes(15.0).total() == 30


def test_pins_of_a_chains_prefixes_are_found() -> None:
    known, keys = PendingHints(), [bytes([i]) * 16 for i in range(6)]
    pins = {keys[i]: pending_hints.PinnedChain(9.0, 10 * i, i) for i in (1, 3, 5)}
    for last, pin in pins.items():
        known.pin(NAMESPACE, last, pin)
    assert known.pins_within(NAMESPACE, keys[:4]) == {keys[i]: pins[keys[i]] for i in (1, 3)}
    assert known.pins_within(NAMESPACE._replace(domain=b"other"), keys) == {}
    known.unpin(NAMESPACE, keys[1])
    assert known.pinned_bytes(0.0) == 80


def test_hints_of_an_erased_domain_are_forgotten() -> None:
    known, other = PendingHints(), NAMESPACE._replace(domain=b"other")
    for namespace in (NAMESPACE, other):
        chain = pending_hints.NamedChain(namespace, b"k" * 16)
        known.follow(namespace, "a", [b"k" * 16])
        known.wait(1.0, PendingPrestage(chain, PrestageTimes(9.0)))
        known.wait(1.0, staging_of(7, 1, namespace=namespace))
        known.pin(namespace, b"k" * 16, pending_hints.PinnedChain(9.0, 100, 1))
        assert known.due(1.0, limit(0)) == [], "there is no room"
        known.wait(5.0, staging_of(8, 1, namespace=namespace))
    known.forget_domain(NAMESPACE.domain)
    assert known.status(0.0) == HintStatus(1, 3, 100)
    known.forget_domain(other.domain)
    assert known.status(0.0) == HintStatus()


def staging_of(
    seed: int,
    blocks: int,
    needed_s: float = 9.0,
    fetch_s: float = 0.0,
    tier: int = 1,
    namespace: Namespace = NAMESPACE,
) -> PendingPrestage:
    keys = b"".join(bytes([seed, number]) * 8 for number in range(blocks))
    return PendingPrestage(NamedChain(namespace, keys), PrestageTimes(needed_s, fetch_s, tier))


def test_a_prestage_longer_than_the_limit_is_cut_to_its_leading_blocks() -> None:
    known, long = PendingHints(), staging_of(1, 10)
    assert known.wait(1.0, long)
    [cut] = known.due(1.0, limit(4 * NAMESPACE.slot_bytes))
    assert cut.chain.keys == long.chain.keys[: 4 * 16]
    assert known.kept_bytes(1.0).total() == 4 * NAMESPACE.slot_bytes
    known.done(cut)
    assert known.kept_bytes(1.0).total() == 0


def test_a_prestage_without_room_waits_until_an_earlier_one_is_used() -> None:
    known, most = PendingHints(), 4 * NAMESPACE.slot_bytes
    first, second, small = staging_of(1, 3), staging_of(2, 2), staging_of(3, 1)
    for staging in (first, second, small):
        assert known.wait(1.0, staging)
    assert known.due(1.0, limit(most)) == [first, small], "a smaller one passes"
    known.done(first)
    last = first.chain.keys[-16:]
    assert known.stage(NAMESPACE, last, PinnedChain(20.0, first.nbytes, 7)) == 0
    assert (known.due(2.0, limit(most)), known.staged_bytes(2.0)) == ([], first.nbytes)
    assert known.take_staged(NAMESPACE, [b"other" * 3 + b"x", last]) == [7]
    assert known.due(3.0, limit(most)) == [second]


def test_a_prestage_that_finds_no_room_in_time_is_dropped() -> None:
    known, most = PendingHints(), 4 * NAMESPACE.slot_bytes
    known.claim(NAMESPACE.domain, most)
    assert known.wait(1.0, staging_of(1, 2, needed_s=9.0))
    assert known.due(9.0 + LATE_S - 0.1, limit(most)) == []
    assert known.status(0.0).prestaging == 1
    assert known.due(9.0 + LATE_S, limit(most)) == []
    assert known.status(0.0).prestaging == 0


def test_a_slow_tier_begins_one_prestage_after_the_other_and_chooses_as_late_as_it_can() -> None:
    known = PendingHints()
    first, second = staging_of(1, 1, fetch_s=2.0), staging_of(2, 1, needed_s=8.0, fetch_s=2.0)
    assert known.wait(0.0, first)
    assert known.due(0.0, limit()) == [first]
    assert known.wait(0.0, second)
    assert known.due(0.5, limit()) == [], "the tier is busy"
    sooner, elsewhere = staging_of(3, 1, needed_s=6.0, fetch_s=2.0), staging_of(4, 1, tier=2)
    assert known.wait(0.0, sooner)
    assert known.wait(0.0, elsewhere)
    assert known.due(1.0, limit()) == [elsewhere], "another tier is not"
    known.done(first)
    assert known.due(2.0, limit()) == [sooner]


def test_a_fast_tier_begins_several_prestages_together() -> None:
    known = PendingHints()
    stagings = [staging_of(seed, 1, fetch_s=0.4 * BEGUN_S) for seed in range(5)]
    for staging in stagings:
        assert known.wait(0.0, staging)
    assert known.due(0.0, limit()) == stagings[:3]
    known.done(stagings[0])
    assert known.due(0.0, limit()) == stagings[3:4]


def test_a_chain_that_is_announced_again_waits_once_and_for_its_new_time() -> None:
    known = PendingHints()
    busy, former = staging_of(1, 1, fetch_s=2.0), staging_of(2, 1, needed_s=5.0, fetch_s=2.0)
    for staging in (busy, former):
        assert known.wait(0.0, staging)
    assert known.due(0.0, limit()) == [former], "it is needed first"
    again = staging_of(1, 1, needed_s=7.0, fetch_s=2.0)
    assert known.wait(0.0, again)
    assert (known.due(0.0, limit()), known.status(0.0).prestaging) == ([], 1)
    known.done(former)
    assert known.due(0.0, limit()) == [again]


def test_a_chain_that_two_engines_wait_for_begins_in_time_for_the_one_that_needs_it_first() -> None:
    known, busy = PendingHints(), staging_of(9, 1, fetch_s=2.0)
    assert known.wait(0.0, busy)
    assert known.due(0.0, limit()) == [busy]
    first, second = (for_engine(staging_of(1, 1, s), f"at {s:g}") for s in (5.0, 50.0))
    between = staging_of(2, 1, needed_s=20.0)
    for staging in (first, second, between):
        assert known.wait(0.0, staging)
    assert known.due(0.0, limit()) == []
    known.done(busy)
    begun = known.due(0.0, limit())
    assert [each.name for each in begun] == [first.name, between.name]
    assert begun[0].needed_s == 50.0, "it is kept for the second one"
    assert known.status(0.0).prestaging == 0


def test_a_chain_that_one_engine_does_not_need_any_more_is_prestaged_for_the_other() -> None:
    known = PendingHints()
    stagings = [for_engine(staging_of(1, 1), engine) for engine in ("a", "b")]
    keys = [stagings[0].chain.keys]
    for staging in stagings:
        assert known.wait(0.0, staging)
    known.claim(NAMESPACE.domain, MOST)
    assert known.due(0.0, limit()) == [], "there is no room yet"
    known.withdraw(NAMESPACE, keys, "b")
    known.end_claim(NAMESPACE.domain, MOST)
    assert known.due(0.0, limit()) == stagings[:1]
    known.done(stagings[0])
    for staging in stagings:
        assert known.wait(1.0, staging)
    [begun] = known.due(1.0, limit())
    assert not any(begun.is_of(NAMESPACE, keys, engine) for engine in ("a", "b"))


def for_engine(staging: PendingPrestage, engine: str) -> PendingPrestage:
    return staging._replace(times=staging.times._replace(engine=engine))


def test_a_prestage_whose_request_got_its_turn_is_forgotten_unless_it_has_begun() -> None:
    known = PendingHints()
    begun, waiting = staging_of(1, 2, fetch_s=2.0), staging_of(2, 2, fetch_s=2.0)
    for staging in (begun, waiting):
        assert known.wait(0.0, staging)
    assert known.due(0.0, limit()) == [begun]
    for staging in (begun, waiting):
        keys = staging.chain.keys
        known.withdraw(NAMESPACE, [keys[:16], keys[16:]])
    known.done(begun)
    assert (known.due(0.0, limit()), known.status(0.0).prestaging) == ([], 0)
    assert known.kept_bytes(0.0).total() == 0


def test_however_many_prestages_of_a_domain_wait_those_of_others_find_room(monkeypatch) -> None:
    monkeypatch.setattr(pending_hints, "WAITING_MAX", 12)
    known, counts = PendingHints(), []
    for namespace in (NAMESPACE, OTHER, THIRD):
        stagings = [staging_of(seed, 1, namespace=namespace) for seed in range(12)]
        counts.append(sum(known.wait(5.0, staging) for staging in stagings))
    assert counts == [6, 3, 1]
    known.forget_domain(NAMESPACE.domain)
    assert known.wait(5.0, staging_of(20, 1, namespace=THIRD))


def test_however_long_the_chains_of_a_domain_are_those_of_others_find_room(monkeypatch) -> None:
    monkeypatch.setattr(pending_hints, "KEYS_BYTES_MAX", 12 * 16)
    known = PendingHints()
    assert known.wait(5.0, staging_of(1, 6))
    assert not known.wait(5.0, staging_of(2, 1))
    assert not known.wait(5.0, staging_of(3, 4, namespace=OTHER))
    assert known.wait(5.0, staging_of(3, 3, namespace=OTHER))


def test_a_prestage_far_ahead_makes_room_for_one_of_its_domain_that_begins_sooner(
    monkeypatch,
) -> None:
    monkeypatch.setattr(pending_hints, "WAITING_MAX", 6)
    known = PendingHints()
    for seed in range(3):
        assert known.wait(80_000.0 + seed, staging_of(seed, 1, 90_000.0))
    assert not known.wait(90_000.0, staging_of(4, 1, 90_000.0)), "it would be the last"
    assert not known.wait(80_002.0, staging_of(4, 1, 90_000.0))
    soon = staging_of(5, 1)
    assert known.wait(1.0, soon)
    assert known.status(0.0).prestaging == 3
    assert known.due(1.0, limit()) == [soon]
    assert known.due(80_001.0, limit()) == [staging_of(seed, 1, 90_000.0) for seed in range(2)]


def test_a_domain_keeps_at_most_as_much_memory_as_it_leaves_free() -> None:
    known, most = PendingHints(), limit(12 * NAMESPACE.slot_bytes, is_shared=True)
    assert known.wait(1.0, staging_of(1, 4))
    assert known.wait(1.0, staging_of(2, 4))
    assert known.wait(1.0, staging_of(3, 4, namespace=OTHER))
    begun = known.due(1.0, most)
    assert [staging.chain.namespace for staging in begun] == [NAMESPACE, OTHER]
    assert known.kept_bytes(1.0)[OTHER.domain] == 4 * NAMESPACE.slot_bytes
    known.pin(THIRD, b"t" * 16, PinnedChain(9.0, 2 * NAMESPACE.slot_bytes, 1))
    assert known.kept_bytes(1.0).total() == 10 * NAMESPACE.slot_bytes
    assert known.due(2.0, most) == [], "the first domain has its part"
