"""Admission by reuse interval: room goes to what comes back soonest for it, and to no more."""

import hashlib
import math
from collections import OrderedDict
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.admit import AdmissionCandidate, AlwaysAdmit
from holdfast.policy.reuse_interval import BUCKETS, ReuseInterval, ServedInterval, _best, _fill

MIB = 1 << 20


def name(number: object) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


class Tier:
    """An LRU tier of so many blocks, asked by its rule, with what it served and wrote."""

    def __init__(self, blocks, rule):
        self.blocks = blocks
        self.rule = rule
        self.held = OrderedDict()
        self.hits = self.written = 0

    def use(self, number, now_s, group=0, *, at_hand=False):
        block = AdmissionCandidate(name(number), group, MIB)
        self.rule.used(block, now_s, at_hand=at_hand)
        if number in self.held:
            self.held.move_to_end(number)
            self.hits += not at_hand
        elif self.rule.admit(block, now_s):
            self.held[number] = None
            self.written += 1
            if len(self.held) > self.blocks:
                self.rule.gave_up(name(self.held.popitem(last=False)[0]), now_s)


def cycles(rule, blocks=100, of=400, rounds=30):
    tier = Tier(blocks, rule)
    for turn in range(rounds):
        for number in range(of):
            tier.use(number, turn * of * 0.1 + number * 0.1)
    return tier


def test_a_cycle_that_does_not_fit_is_partly_kept_and_hit():
    lru, kept = cycles(AlwaysAdmit()), cycles(ReuseInterval(100 * MIB, sample=1))
    assert lru.hits == 0
    assert kept.hits > 0.15 * 30 * 400, "a quarter would fit, all the time"
    assert kept.written < 0.1 * lru.written


def test_a_cycle_that_fits_is_taken_whole():
    tier = cycles(ReuseInterval(110 * MIB, sample=1), blocks=110, of=100)
    assert (tier.hits, tier.written) == (29 * 100, 100)


def test_space_goes_to_the_class_with_the_shortest_reuse_interval():
    rule = ReuseInterval(60 * MIB, sample=1)
    tier, slow, now_s = Tier(60, rule), count(), 0.0
    for turn in range(4_000):
        now_s = turn * 0.5
        tier.use(("quick", turn % 40), now_s, "quick")
        tier.use(("slow", next(slow) % 1_000), now_s, "slow")
    assert rule.setting.shares["quick"] == 1.0
    assert rule.setting.shares["slow"] < 0.1
    assert tier.hits > 0.85 * 4_000
    figures = rule.figures()
    assert 20.0 <= figures["break_even_s"] < 1_000.0
    assert figures["residency_s"] > 20.0


def test_a_class_without_reuse_gets_less_space_than_a_reused_class():
    rule, now_s = ReuseInterval(60 * MIB, sample=1), 0.0
    tier, fresh = Tier(60, rule), count()
    for turn in range(4_000):
        now_s = turn * 0.5
        tier.use(("quick", turn % 50), now_s, "quick")
        for _ in range(4):
            tier.use(("scan", next(fresh)), now_s, "scan")
    assert rule.setting.shares["scan"] < 0.05
    assert tier.hits > 0.8 * 4_000


def test_reuse_served_by_a_faster_tier_earns_no_space():
    rule = ReuseInterval(66 * MIB, sample=1)
    tier = Tier(66, rule)
    for turn in range(4_000):
        now_s = turn * 0.5
        tier.use(("hot", turn % 50), now_s, "hot", at_hand=turn >= 50)
        tier.use(("warm", turn % 55), now_s, "warm")
    assert rule.setting.shares["warm"] == 1.0
    assert rule.setting.shares["hot"] < 0.2


def test_a_tier_that_saves_no_time_gets_only_a_few_trial_blocks():
    rule = ReuseInterval(1_000 * MIB, lambda nbytes: -1e-9 * nbytes, sample=1)
    for turn in range(4_000):
        rule.used(AdmissionCandidate(name(turn % 100), 0, MIB), turn * 0.1)
        rule.admit(AdmissionCandidate(name(turn), 0, MIB), turn * 0.1)
    taken = sum(
        rule.admit(AdmissionCandidate(name(number), 0, MIB), 400.0) for number in range(6_400)
    )
    assert 50 < taken < 160
    assert rule.figures()["break_even_s"] == 0.0


def test_a_class_that_saves_more_per_byte_is_admitted_first():
    """Where the tier below is slow to answer, small blocks are worth more a byte."""
    rule = ReuseInterval(70 * MIB, lambda nbytes: 1e-3 + nbytes / 1e9, sample=1)
    for turn in range(4_000):
        now_s = turn * 0.5
        rule.used(AdmissionCandidate(name(("large", turn % 50)), "large", MIB), now_s)
        for part in range(4):
            small = name(("small", turn % 60, part))
            rule.used(AdmissionCandidate(small, "small", MIB // 4), now_s)
        rule.admit(AdmissionCandidate(name(0), "large", MIB), now_s)
    assert rule.setting.shares["small"] == pytest.approx(1.0)
    assert rule.setting.shares["large"] < 0.7


def test_blocks_are_admitted_until_reuse_has_been_measured():
    rule = ReuseInterval(MIB)
    assert all(rule.admit(AdmissionCandidate(name(n), "new", MIB), float(n)) for n in range(100))
    assert rule.figures() == {}


def test_the_class_that_is_used_longest_ago_is_forgotten_first():
    rule = ReuseInterval(MIB, sample=1)
    rule.used(AdmissionCandidate(name(0), "old", MIB), 0.0)
    old = rule._classes["old"]
    for number in range(600):
        rule.used(AdmissionCandidate(name(0), "old", MIB), number * 1e-3)
        rule.used(AdmissionCandidate(name(number), number, MIB), number * 1e-3)
    assert rule._classes["old"] is old


def test_the_numbers_of_remembered_names_and_classes_are_bounded():
    rule = ReuseInterval(MIB, watched=64, sample=1)
    for number in range(3_000):
        rule.used(AdmissionCandidate(name(number), number, MIB), number * 1e-3)
        rule.admit(AdmissionCandidate(name(number), number, MIB), number * 1e-3)
    assert len(rule._classes) <= 256
    assert len(rule._watch._since) <= 64
    assert sum(map(len, rule._watch._buckets)) <= 3_000


classes = st.lists(
    st.builds(
        ServedInterval,
        st.integers(),
        st.floats(0.0, 1.0),
        st.floats(1e-3, 1e6),
        st.floats(-1e-9, 1e-6),
        st.floats(0.0, 1e10),
    ),
    max_size=8,
    unique_by=lambda each: each.group,
)


@given(classes, st.floats(1.0, 1e13))
def test_admission_shares_never_exceed_the_capacity(served, capacity):
    setting = _fill(capacity, 1.0, served)
    held = sum(setting.shares[each.group] * each.bytes_per_s * each.spent_s for each in served)
    assert held <= capacity * (1 + 1e-9)
    assert all(0.0 <= share <= 1.0 for share in setting.shares.values())
    for each in served:
        if setting.shares[each.group] > 0.0:
            assert each.worth > 0.0


@given(classes, st.floats(1.0, 1e12))
def test_more_capacity_never_saves_less_time(served, capacity):
    saved = [_fill(room, 1.0, served).saved for room in (capacity, 2 * capacity)]
    assert saved[1] >= saved[0] * (1 - 1e-9)


@given(classes, st.floats(1.0, 1e12))
def test_classes_are_admitted_in_order_of_time_saved_per_space(served, capacity):
    setting = _fill(capacity, 1.0, served)
    gains = sorted(
        (each for each in served if each.worth > 0 and each.part > 0),
        key=lambda each: each.interval_s / each.worth,
    )
    shares = [setting.shares[each.group] for each in gains]
    assert all(first >= second for first, second in pairwise(shares))
    assert sum(0.0 < share < 1.0 for share in shares) <= 1


@given(st.lists(classes, min_size=3, max_size=3), st.floats(1.0, 1e12))
def test_the_chosen_setting_saves_as_much_as_the_best_candidate(by_residency, capacity):
    best = _best(capacity, [by_residency[n % 3] for n in range(BUCKETS)])
    ways = [_fill(capacity, 1.0, served).saved for served in by_residency]
    if max(ways) > 0:
        assert best.saved >= 0.99 * max(ways)
    else:
        assert best.break_even_s == 0.0
        assert all(share <= 1.0 for share in best.shares.values())
    assert not math.isnan(best.saved)
