"""The thrash guard shuts the door on a cycle that does not fit, and never on what comes to use."""

from collections import OrderedDict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.admit import AdmissionCandidate, AlwaysAdmit, PerDomain, SecondTouch
from holdfast.policy.guard import ThrashGuard

MIB = 1 << 20
BLOCKS = 64


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Tier:
    """An LRU tier asked by its rule; `uses` counts each block's."""

    def __init__(self, rule, blocks=BLOCKS):
        self.rule = rule
        self.blocks = blocks
        self.uses = {}
        self.held = OrderedDict()
        self.hits = self.written = 0

    def use(self, number, now_s):
        uses = self.uses[number] = self.uses.get(number, 0) + 1
        block = AdmissionCandidate(name(number), 0, MIB, uses=min(uses, 4))
        self.rule.used(block, now_s)
        if number in self.held:
            self.held.move_to_end(number)
            self.hits += 1
        elif self.rule.admit(block, now_s):
            self.held[number] = None
            self.written += 1
            if len(self.held) > self.blocks:
                self.rule.gave_up(name(self.held.popitem(last=False)[0]), now_s)


def guarded(rule=None):
    return ThrashGuard(rule or AlwaysAdmit(), BLOCKS * MIB, sample=1)


def play(tier, numbers, start_s=0.0):
    for at, number in enumerate(numbers):
        tier.use(number, start_s + at * 0.1)
    return tier


def test_a_guarded_cycle_that_does_not_fit_writes_less_and_hits_more():
    cycle = [n for _ in range(60) for n in range(4 * BLOCKS)]
    lru, kept = play(Tier(AlwaysAdmit()), cycle), play(Tier(guarded()), cycle)
    assert lru.hits == 0
    assert lru.written == len(cycle)
    assert kept.written < 0.2 * lru.written
    assert kept.hits > 0.15 * len(cycle), "a quarter of it fits"
    assert kept.rule.figures()["pauses"] >= 1
    assert kept.rule.figures()["kept_out"] > 0.5 * len(cycle)


def test_a_cycle_that_fits_is_never_kept_out():
    tier = play(Tier(guarded()), [n for _ in range(60) for n in range(BLOCKS)])
    assert (tier.rule.pauses, tier.written) == (0, BLOCKS)


def test_blocks_that_are_used_once_cause_no_pause():
    """It may be a waste of writes: that is for the rule to say."""
    tier = play(Tier(guarded()), range(40 * BLOCKS))
    assert (tier.rule.pauses, tier.written) == (0, 40 * BLOCKS)


def test_a_tenth_of_blocks_that_is_reused_loses_no_hits_to_the_guard():
    numbers = []
    for turn in range(3_000):
        numbers += [turn % 1_000, 10_000 + turn, *([10_000 + turn - 20] if turn % 5 == 0 else [])]
    tier = play(Tier(guarded()), numbers)
    open_door = play(Tier(AlwaysAdmit()), numbers)
    assert tier.hits >= open_door.hits


def test_pauses_of_the_guard_end_and_grow_while_thrashing_continues():
    rule = guarded()
    cycle = [n for _ in range(200) for n in range(4 * BLOCKS)]
    tier, shut, was = Tier(rule), [], False
    for at, number in enumerate(cycle):
        tier.use(number, at * 0.1)
        if rule.paused != was:
            shut.append((at, rule.paused))
            was = rule.paused
    lengths = [end - start for (start, on), (end, _) in pairwise(shut) if on]
    assert len(lengths) >= 3
    assert lengths[1:] == sorted(lengths[1:])
    assert lengths[-1] > 1.5 * lengths[0]


def test_the_guard_admits_everything_again_after_thrashing_ends():
    rule = guarded()
    tier = play(Tier(rule), [n for _ in range(60) for n in range(4 * BLOCKS)])
    assert rule.pauses
    play(tier, [5_000 + n for _ in range(200) for n in range(BLOCKS // 2)], start_s=50_000.0)
    pauses, hits = rule.pauses, tier.hits
    play(tier, [5_000 + n for _ in range(20) for n in range(BLOCKS // 2)], start_s=80_000.0)
    assert rule.pauses == pauses
    assert tier.hits - hits == 20 * BLOCKS // 2


def test_the_guard_passes_uses_and_requests_to_the_rule_behind_it():
    rule = guarded(SecondTouch(1_000))
    block = AdmissionCandidate(name(1), 0, MIB)
    rule.used(block, 0.0)
    assert not rule.admit(block, 0.0)
    rule.used(block, 1.0)
    assert rule.admit(block, 1.0)
    assert rule.figures() == {"paused": 0.0, "pauses": 0.0, "kept_out": 0.0}


def test_blocks_refused_by_a_later_rule_cause_no_pause():
    rule = PerDomain(guarded(), {b"": SecondTouch(1_000)})
    for number in range(4 * BLOCKS):
        block = AdmissionCandidate(name(number), 0, MIB, uses=2)
        assert not rule.admit(block, 0.0)
        rule.gave_up(block.name, 1.0)
    assert rule.figures()["pauses"] == 0.0


events = st.lists(
    st.tuples(st.sampled_from(["use", "admit", "gone"]), st.integers(0, 200), st.integers(1, 4)),
    max_size=1_500,
)


@given(events)
def test_the_guard_pauses_only_after_enough_unused_evictions(happened):
    rule = ThrashGuard(AlwaysAdmit(), 16 * MIB, sample=1)
    watched, wasted = {}, 0
    for at, (what, number, uses) in enumerate(happened):
        block = AdmissionCandidate(name(number), 0, MIB, uses=uses)
        match what:
            case "use":
                rule.used(block, float(at))
                if number in watched:
                    watched[number] = True
            case "admit":
                if rule.admit(block, float(at)) and uses > 1:
                    watched[number] = False
            case "gone":
                rule.gave_up(name(number), float(at))
                wasted += watched.pop(number, True) is False
        assert rule.pauses * 16 * 0.95 <= wasted
        assert not rule.paused or rule.pauses
        assert rule.kept_out <= at + 1
        assert len(rule._watched) <= 201


@given(st.lists(st.integers(0, BLOCKS - 1), max_size=2_000))
def test_a_workload_that_fits_is_served_as_without_a_guard(numbers):
    with_guard, without = play(Tier(guarded()), numbers), play(Tier(AlwaysAdmit()), numbers)
    assert (with_guard.hits, with_guard.written) == (without.hits, without.written)
