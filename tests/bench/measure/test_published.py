"""What others published, simulated: Mooncake's shared cache, and the tiers of an H20 host."""

import pytest

from holdfast.sim.formats.load import load
from holdfast.sim.shipped import find_trace
from holdfast_bench.measure.published import (
    FETCH_RULE_GB_PER_S,
    FETCH_RULE_TOLERANCE,
    H20_FIRST_TOKEN_S,
    H20_TOLERANCE,
    TOGETHER,
    TOGETHER_TOLERANCE,
    fetch_rule_gb_per_s,
    h20_first_token_s,
    together_over_apart,
)


@pytest.mark.parametrize("name", TOGETHER)
def test_the_gain_of_a_shared_cache_matches_the_mooncake_figure(name):
    gain = together_over_apart(load(find_trace(name)))
    assert gain == pytest.approx(TOGETHER[name], rel=TOGETHER_TOLERANCE)


@pytest.mark.parametrize("tier", H20_FIRST_TOKEN_S)
def test_the_simulated_ttft_of_h20_tiers_matches_the_published_one(tier):
    assert h20_first_token_s(tier) == pytest.approx(H20_FIRST_TOKEN_S[tier], rel=H20_TOLERANCE)


@pytest.mark.parametrize("gpu", FETCH_RULE_GB_PER_S)
def test_the_break_even_bandwidth_of_a_fetch_matches_mooncake(gpu):
    published = FETCH_RULE_GB_PER_S[gpu]
    assert fetch_rule_gb_per_s(gpu) == pytest.approx(published, rel=FETCH_RULE_TOLERANCE)
