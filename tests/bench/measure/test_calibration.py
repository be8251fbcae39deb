"""What a calibration makes of measured times is what made them, and predicts them again."""

import pytest

from holdfast.errors import ConfigError
from holdfast.plan.cost import PrefillCost, TierEstimate
from holdfast.sim.ladder import parse_ladder
from holdfast_bench.measure import calibration

TRUE = PrefillCost(0.02, 4e-4, 6e-8)
DISK = TierEstimate(0.01, 1.5e9)
TOKEN_BYTES, TAIL = 32_768.0, 16
LENGTHS = (512, 1024, 2048, 3072)
GIB = 1 << 30


def cold_s(tokens):
    return TRUE.seconds(tokens + TAIL)


def warm_s(tokens):
    return DISK.seconds(tokens * TOKEN_BYTES) + TRUE.seconds(TAIL, tokens)


@pytest.fixture(scope="module")
def data():
    prefill = calibration.prefill_of({n: cold_s(n) for n in LENGTHS}, TAIL)
    warm = {n: warm_s(n) for n in LENGTHS}
    tiers = {"disk": calibration.tier_of(warm, prefill, TOKEN_BYTES, TAIL)}
    return calibration.ladder_data(prefill, tiers, TOKEN_BYTES, {"disk": 8 * GIB})


def test_a_length_that_was_not_measured_is_predicted(data):
    cold, warm = calibration.predict(data, "disk", 4096, TAIL)
    assert cold == pytest.approx(cold_s(4096), rel=0.05)
    assert warm == pytest.approx(warm_s(4096), rel=0.10)


@pytest.mark.parametrize("true", [TierEstimate(0.035, 1.05e9), TierEstimate(0.0, 0.8e9)])
def test_the_fixed_engine_cost_of_a_fetch_is_not_attributed_to_the_tier(true):
    """Latencies of 35 ms came out as a few, and bandwidth as little more than half."""
    prefill = calibration.prefill_of({n: cold_s(n) for n in LENGTHS}, TAIL)
    warm = {n: true.seconds(n * TOKEN_BYTES) + TRUE.seconds(TAIL, n) for n in LENGTHS}
    noisy = {n: s * (1 + 0.03 * (-1) ** i) for i, (n, s) in enumerate(warm.items())}
    for times in (warm, noisy):
        tier = calibration.tier_of(times, prefill, TOKEN_BYTES, TAIL)
        assert tier.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.15)
        assert tier.seconds(4096 * TOKEN_BYTES) == pytest.approx(
            true.seconds(4096 * TOKEN_BYTES), rel=0.12
        )


def test_equal_times_at_all_lengths_give_a_finite_bandwidth():
    prefill = calibration.prefill_of({n: cold_s(n) for n in LENGTHS}, TAIL)
    alike = {n: 0.2 - 0.01 * i for i, n in enumerate((256, 512, 1024))}
    assert calibration.tier_of(alike, prefill, TOKEN_BYTES, TAIL).bytes_per_s < 1e11


def test_the_ladder_is_one_that_sim_reads(data):
    ladder = parse_ladder(data)
    assert [tier.kind for tier in ladder.tiers] == ["disk"]
    assert ladder.token_bytes == TOKEN_BYTES
    assert ladder.engine.prefill.b == pytest.approx(TRUE.b, rel=0.2)


def test_a_tier_slower_than_computing_is_not_used():
    prefill = calibration.prefill_of({n: cold_s(n) for n in LENGTHS}, TAIL)
    slow = {"disk": TierEstimate(0.1, 1e7)}
    data = calibration.ladder_data(prefill, slow, TOKEN_BYTES, {"disk": 8 * GIB})
    cold, warm = calibration.predict(data, "disk", 2048, TAIL)
    assert warm == pytest.approx(cold)


def test_too_few_lengths_are_refused():
    with pytest.raises(ConfigError, match="2 lengths are too few for a fit; measure at least 3"):
        calibration.prefill_of({1: 1.0, 2: 2.0}, TAIL)
