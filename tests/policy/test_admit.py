"""Admission rules: each takes what it says, and forgets what it must."""

import hashlib

import pytest

from holdfast.policy.admit import (
    DAY_S,
    AdmissionCandidate,
    AlwaysAdmit,
    PerDomain,
    ReusePrediction,
    SecondTouch,
    WriteBudget,
)

MIB = 1 << 20


def name(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def block(number: int, group: object = 0, nbytes: int = MIB) -> AdmissionCandidate:
    return AdmissionCandidate(name(number), group, nbytes)


def test_always_admit_admits_every_block():
    assert AlwaysAdmit().admit(block(1), 0.0)


def test_a_domain_without_budget_left_charges_nothing_to_the_tiers_budget():
    own = WriteBudget(AlwaysAdmit(), 24 * 3 * MIB)
    rule = WriteBudget(PerDomain(SecondTouch(1_000), {b"poor": own}), 24 * 10 * MIB)
    for number in range(100):
        rule.used(block(number, 0), 0.0)
        rule.used(block(number, 0), 0.0)
    assert not rule.admit(block(500)._replace(domain=b"poor"), 0.0)
    poor = [rule.admit(block(n)._replace(domain=b"poor"), 0.0) for n in range(50)]
    assert sum(poor) == 3
    assert sum(rule.admit(block(n), 0.0) for n in range(50, 100)) == 7


def test_a_domain_is_not_charged_for_blocks_that_its_tier_does_not_write():
    own = WriteBudget(AlwaysAdmit(), 24 * 3 * MIB)
    rule = WriteBudget(PerDomain(AlwaysAdmit(), {b"poor": own}), 24 * 2 * MIB)
    blocks = [block(n)._replace(domain=b"poor") for n in range(20)]
    assert sum(rule.admit(each, 0.0) for each in blocks) == 2
    assert sum(own.admit(each, 0.0) for each in blocks) == 1


def test_second_touch_admits_blocks_used_twice():
    rule = SecondTouch(1_000)
    for number in range(500):
        rule.used(block(number, 0), 0.0)
    assert not any(rule.admit(block(number), 0.0) for number in range(500))
    for number in range(100):
        rule.used(block(number, 0), 0.0)
    assert all(rule.admit(block(number), 0.0) for number in range(100))
    assert sum(rule.admit(block(number), 0.0) for number in range(100, 500)) <= 4


def test_second_touch_forgets_old_uses():
    rule = SecondTouch(100)
    rule.used(block(0, 0), 0.0)
    for number in range(1, 301):
        rule.used(block(number, 0), 0.0)
    rule.used(block(0, 0), 0.0)
    assert not rule.admit(block(0), 0.0)


def test_second_touch_rarely_admits_a_block_used_once():
    rule = SecondTouch(4_096)
    taken = 0
    for number in range(8_192):
        rule.used(block(number, 0), 0.0)
        taken += rule.admit(block(number), 0.0)
    assert taken <= 8_192 / 200


def test_reuse_is_learnt_per_class():
    for least_chance in (0.05, 0.9):
        rule = ReusePrediction(least_chance, watched=64, sample=1)
        for number in range(1_000):
            rule.used(block(number, "scan"), 0.0)
            rule.used(block(number % 32 + 10_000, "chat"), 0.0)
        assert not rule.admit(block(1, "scan"), 0.0)
        assert rule.admit(block(1, "chat"), 0.0)


def test_a_block_of_an_unknown_class_is_admitted():
    assert ReusePrediction().admit(block(1, "new"), 0.0)


def test_a_class_whose_reuse_changes_is_learnt_again():
    rule = ReusePrediction(watched=16, sample=1)
    for number in range(5_000):
        rule.used(block(number, "c"), 0.0)
    assert not rule.admit(block(1, "c"), 0.0)
    for _ in range(600):
        for number in range(8):
            rule.used(block(number, "c"), 0.0)
    assert rule.admit(block(1, "c"), 0.0)


def test_the_class_that_is_used_longest_ago_is_forgotten_first():
    rule = ReusePrediction(watched=8, sample=1)
    rule.used(block(0, "old"), 0.0)
    rule.used(block(0, "old"), 0.0)
    old = rule._classes["old"]
    for number in range(1, 10_000):
        rule.used(block(0, "old"), 0.0)
        rule.used(block(number, number), 0.0)
    assert rule._classes["old"] is old


def test_the_number_of_remembered_classes_is_bounded():
    rule = ReusePrediction(watched=4, sample=1)
    for number in range(10_000):
        rule.used(block(number, number), 0.0)
    assert len(rule._classes) <= 4_096
    assert len(rule._watched) == 4


def written(rule, rate: int, seconds: range) -> int:
    """Offer `rate` blocks of a MiB a second; return how many were let through."""
    offers = (block(at * rate + turn) for at in seconds for turn in range(rate))
    return sum(rule.admit(offer, at / rate) for at, offer in enumerate(offers))


def test_a_days_writes_stay_within_the_budget_and_last_all_day():
    budget = 20_000
    rule = WriteBudget(AlwaysAdmit(), budget * MIB)
    halves = [written(rule, 1, range(at, at + 43_200)) for at in (0,)]
    passed = sum(rule.admit(block(at), float(at)) for at in range(43_200, 86_400))
    assert 0.9 * budget <= halves[0] + passed <= budget
    assert abs(halves[0] - passed) < 0.15 * budget
    assert rule.share == pytest.approx(20_000 / 86_400, rel=0.3)


def test_all_blocks_are_admitted_if_they_fit_the_budget():
    rule = WriteBudget(AlwaysAdmit(), 100_000 * MIB)
    assert all(rule.admit(block(at), float(at)) for at in range(0, 86_000, 10))


def test_a_spent_write_budget_is_available_again_the_next_day():
    rule = WriteBudget(AlwaysAdmit(), 240 * MIB)
    offers = [(number, 3_600.0 * (number // 50)) for number in range(24 * 50)]
    assert 216 <= sum(rule.admit(block(number), at) for number, at in offers) <= 240
    assert sum(rule.admit(block(number), at + DAY_S) for number, at in offers) >= 150


def test_no_minute_spends_more_than_one_hour_of_the_budget():
    rule = WriteBudget(AlwaysAdmit(), 240 * MIB)
    assert sum(rule.admit(block(number), 0.0) for number in range(500)) == 10
    assert rule.figures()["over_budget"] == 490


def test_one_block_larger_than_one_hour_of_the_budget_is_admitted():
    rule = WriteBudget(AlwaysAdmit(), 4 * MIB)
    assert [rule.admit(block(number), 0.0) for number in range(3)] == [True, False, False]


def test_the_budget_asks_its_rule_first():
    rule = WriteBudget(SecondTouch(10), 100 * MIB)
    rule.used(block(1, 0), 0.0)
    assert not rule.admit(block(1), 0.0)
    rule.used(block(1, 0), 0.0)
    assert rule.admit(block(1), 0.0)
    assert rule.figures()["over_budget"] == 0
