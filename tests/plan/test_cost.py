"""Costs are learnt from observations, whatever the outliers, and never below zero."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.cost import (
    LOWER_DEFAULT,
    PREFILL_OBSERVATIONS_MIN,
    DeliveryFit,
    PrefillCost,
    PrefillFit,
    TierEstimate,
    TierFit,
)

TRUE = PrefillCost(8e-3, 2.5e-4, 2e-8)
SIZES = [(128, 0), (512, 0), (2048, 0), (2048, 2048), (2048, 6144), (700, 9000)]


def learnt(noise: float, outliers: float, steps: int = 120) -> PrefillFit:
    chance = random.Random(7)
    fit = PrefillFit()
    for _ in range(steps):
        new, context = chance.choice(SIZES)
        seconds = TRUE.seconds(new, context) * (1 + noise * chance.uniform(-1, 1))
        if chance.random() < outliers:
            seconds *= chance.choice((0.1, 6.0, 30.0))
        fit.observe(new, context, seconds)
    return fit


@pytest.mark.parametrize(
    ("noise", "outliers", "within"), [(0.0, 0.0, 0.001), (0.05, 0.0, 0.03), (0.05, 0.2, 0.06)]
)
def test_prefill_is_learnt_despite_outliers(noise, outliers, within):
    cost = learnt(noise, outliers).cost
    assert cost is not None
    for new, context in [*SIZES, (8192, 0), (1024, 4096)]:
        assert cost.seconds(new, context) == pytest.approx(TRUE.seconds(new, context), rel=within)


def test_the_prefill_cost_is_unknown_until_there_are_enough_steps():
    fit = PrefillFit()
    for _ in range(PREFILL_OBSERVATIONS_MIN):
        assert fit.cost is None
        fit.observe(1024, 0, 0.5)
    assert fit.cost is not None
    assert fit.cost.seconds(1024) == pytest.approx(0.5, rel=0.02)


def test_steps_of_one_size_attribute_the_cost_to_the_tokens():
    fit = PrefillFit()
    for _ in range(20):
        fit.observe(1024, 0, 0.5)
    assert fit.cost is not None
    assert fit.cost.seconds(2048) == pytest.approx(1.0, rel=0.05)


def test_many_equal_steps_do_not_push_out_other_sizes():
    fit = learnt(0.0, 0.0)
    for _ in range(5000):
        fit.observe(2048, 0, TRUE.seconds(2048))
    assert fit.cost is not None
    assert fit.cost.seconds(128) == pytest.approx(TRUE.seconds(128), rel=0.05)


def test_an_engine_that_becomes_slower_is_noticed():
    fit = learnt(0.02, 0.0)
    for new, context in SIZES * 40:
        fit.observe(new, context, 2 * TRUE.seconds(new, context))
    assert fit.cost is not None
    assert fit.cost.seconds(2048) == pytest.approx(2 * TRUE.seconds(2048), rel=0.05)


def test_several_prompts_of_a_step_count_as_one():
    new, pairs = 3 * 1024, 3 * 1024 * 512  # three prompts of 1,024
    seconds = TRUE.a + TRUE.b * new + TRUE.c * pairs
    fit = learnt(0.0, 0.0)
    for _ in range(20):
        fit.observe(new, pairs / new - new / 2, seconds)
    assert fit.cost is not None
    assert fit.cost.seconds(2048) == pytest.approx(TRUE.seconds(2048), rel=0.01)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**5), st.integers(0, 10**6), st.floats(1e-6, 1e4)), max_size=40
    )
)
def test_coefficients_are_never_negative(steps):
    fit = PrefillFit()
    for step in steps:
        fit.observe(*step)
    assert fit.cost is None or min(fit.cost) >= 0


def test_impossible_steps_are_ignored():
    fit = PrefillFit()
    for step in [(0, 0, 1.0), (5, 0, 0.0), (5, 0, -1.0), (5, 0, float("nan")), (5, -9, 1.0)]:
        fit.observe(*step)
    assert fit.count == 0


def test_nothing_to_compute_takes_no_time():
    assert TRUE.seconds(0, 5000) == 0.0
    assert TRUE.seconds(-3, 5000) == 0.0


def test_a_tier_is_learnt_from_reads_of_several_sizes():
    fit = TierFit()
    for nbytes in [1 << 20, 4 << 20, 16 << 20, 64 << 20] * 6:
        fit.observe(nbytes, 3e-3 + nbytes / 2e9)
    estimate = fit.estimate(queued_bytes=7)
    assert estimate.latency_s == pytest.approx(3e-3, rel=0.1)
    assert estimate.bytes_per_s == pytest.approx(2e9, rel=0.05)
    assert estimate.queued_bytes == 7


def test_a_tier_starts_at_its_default_and_reads_of_one_size_change_the_bandwidth():
    fit = TierFit()
    assert fit.estimate() == pytest.approx(LOWER_DEFAULT)
    for _ in range(4):
        fit.observe(16 << 20, 0.16)
    assert fit.estimate().seconds(16 << 20) == pytest.approx(0.16, rel=0.1)


def test_a_slow_tier_is_noticed_after_a_few_reads_and_one_slow_read_is_ignored():
    fit = TierFit()
    for _ in range(40):
        fit.observe(16 << 20, 0.016)
    fit.observe(16 << 20, 0.5)
    assert fit.estimate().seconds(16 << 20) == pytest.approx(0.016, rel=0.1)
    for _ in range(10):
        fit.observe(16 << 20, 0.5)
    assert fit.estimate().seconds(16 << 20) == pytest.approx(0.5, rel=0.1)


def test_an_estimate_includes_the_queue_and_is_infinite_without_bandwidth():
    assert TierEstimate(1.0, 100.0, 300.0).seconds(200.0) == 6.0
    assert TierEstimate(1.0, 0.0).seconds(1.0) == float("inf")
    assert TierEstimate(1.0, 0.0).seconds(0.0) == 0.0


def test_fits_are_restored_from_plain_data():
    fit = learnt(0.05, 0.1)
    again, tier_again = PrefillFit(), TierFit()
    again.restore(json.loads(json.dumps(fit.as_data())))
    assert again.cost == pytest.approx(fit.cost)
    tier = TierFit()
    tier.observe(1 << 20, 0.5)
    tier_again.restore(json.loads(json.dumps(tier.as_data())))
    assert tier_again.estimate() == tier.estimate()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"count": 1},
        {"count": "x", "seen": []},
        {"count": 1, "seen": [[1, 2]]},
        {"count": 1, "seen": [[1, 2, 3, -1, 1]]},
        {"count": 1, "seen": [[1, 2, 3, 1, 9]]},
        {"count": 1, "seen": 5},
        {"count": 1, "seen": [["a", 2, 3, 1, 1]]},
    ],
)
def test_data_that_is_not_a_saved_fit_is_refused(data):
    with pytest.raises(ValueError, match=r"not the saved state of a fit|could not convert"):
        PrefillFit().restore(data)


def test_small_reads_that_contradict_large_ones_change_the_estimate():
    fit = TierFit()
    for _ in range(3):
        fit.observe(64 << 20, 0.064)
    fit.observe(1 << 20, 2.0)
    assert fit.estimate().seconds(64 << 20) < 1.0, "one may be chance"
    for _ in range(12):
        fit.observe(1 << 20, 2.0)
    assert fit.estimate().seconds(1 << 20) == pytest.approx(2.0, rel=0.15)


ABSURD = [0.0, 5e-324, 1e-300, 1e-9, 1.0, 1e12, 1e24, 1e100, 1e300, math.inf, math.nan, -1.0]


@given(
    steps=st.lists(st.tuples(*[st.sampled_from(ABSURD) | st.floats()] * 3), min_size=3, max_size=12)
)
def test_a_fit_is_finite_for_any_reported_steps(steps):
    prefill, tier = PrefillFit(), TierFit()
    for new, context, seconds in steps:
        prefill.observe(new, context, seconds)
        tier.observe(new, seconds)
    assert prefill.cost is None or all(0 <= each < math.inf for each in prefill.cost)
    latency_s, bytes_per_s, _ = tier.estimate()
    assert 0 <= latency_s < math.inf
    assert 0 < bytes_per_s < math.inf


def test_impossible_saved_steps_are_not_restored():
    data = {"count": 3, "seen": [[1.0, 1e9, 1e18, 1e-300, 3]]}
    with pytest.raises(ValueError, match="not the saved state of a fit"):
        PrefillFit().restore(data)


def test_a_delivery_of_one_block_does_not_change_the_bandwidth() -> None:
    fit = DeliveryFit(TierEstimate(1e-3, 5e9))
    fit.observe(266_240, 7.4e-3)
    estimate = fit.estimate()
    assert estimate.latency_s == pytest.approx(7.4e-3, rel=0.05)
    assert estimate.bytes_per_s > 1e9


def test_a_slow_delivery_is_learnt_from_different_sizes() -> None:
    fit = DeliveryFit(TierEstimate(1e-3, 5e9))
    for nbytes in (1e6, 4e6, 16e6, 64e6) * 4:
        fit.observe(nbytes, 2e-3 + nbytes / 5e8)
    assert fit.estimate().bytes_per_s == pytest.approx(5e8, rel=0.05)
