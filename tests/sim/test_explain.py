"""Every figure of every explained claim, against figures worked out independently."""

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.explain import (
    CLAIMS,
    FAILS,
    HOLDS,
    HOLDS_IF,
    fetch_rule_bytes_per_s,
    find_claim,
    tokens_per_dollar_gain,
)

VERDICTS = {
    "context-70b": HOLDS,
    "half-h100": HOLDS,
    "token-405b": HOLDS,
    "token-qwen72b": HOLDS_IF,
    "mla-17x": FAILS,
    "compression": HOLDS_IF,
    "mla-preset": FAILS,
    "share-at-1m": HOLDS_IF,
    "users-320tb": HOLDS_IF,
    "ttft-20x": HOLDS_IF,
    "gpu-time-90": HOLDS_IF,
    "tokens-per-dollar": HOLDS_IF,
    "fetch-rule": HOLDS,
    "break-even": HOLDS_IF,
    "latency-1000x": HOLDS_IF,
    "latency-slo": FAILS,
    "hbm": HOLDS_IF,
    "ddr5": HOLDS,
    "wear": HOLDS_IF,
}

# claim, figure, value, tolerance: exact where it follows from whole numbers.
FIGURES = [
    ("context-70b", "per_token", 327_680, 0),
    ("context-70b", "gb", 41.9, 0.05),
    ("context-70b", "gb_binary", 42.9, 0.05),
    ("half-h100", "share", 0.52, 0.005),
    ("half-h100", "share_binary", 0.54, 0.005),
    ("token-405b", "per_token", 516_096, 0),
    ("token-qwen72b", "per_token", 327_680, 0),
    ("mla-17x", "tokens_in_8_gb", 228_000, 500),
    ("mla-17x", "dense_gb", 135.3, 0.05),
    ("mla-17x", "latent_gb", 9.2, 0.05),
    ("mla-17x", "latent_bf16_gb", 9.0, 0.05),
    ("mla-17x", "against_itself", 71, 0.5),
    ("compression", "grouped", 8, 0),
    ("compression", "latent", 71, 0.5),
    ("mla-preset", "preset", 1_749_384, 500),
    ("mla-preset", "per_token", 70_272, 0),
    ("mla-preset", "ratio", 25, 0.5),
    ("share-at-1m", "Llama-3.1-70B bf16", 0.70, 0.005),
    ("share-at-1m", "Llama-3.1-70B fp8", 0.82, 0.005),
    ("share-at-1m", "Llama-3.1-405B fp8", 0.56, 0.005),
    ("share-at-1m", "DeepSeek-V3 published", 0.09, 0.005),
    ("share-at-1m", "gpt-oss-120b published", 0.36, 0.005),
    ("users-320tb", "tb", 320, 0),
    ("users-320tb", "Llama-3.1-70B bf16 tokens", 97_700, 100),
    ("users-320tb", "Llama-3.1-405B bf16 tokens", 62_000, 100),
    ("users-320tb", "DeepSeek-V3 bf16 tokens", 455_000, 500),
    ("users-320tb", "DeepSeek-V4-Flash bf16 tokens", 5.137e6, 1e4),
    ("users-320tb", "Llama-3.1-70B bf16 tb", 328, 0.5),
    ("users-320tb", "Llama-3.1-405B bf16 tb", 516, 0.5),
    ("users-320tb", "Qwen3-235B bf16 tb", 193, 0.6),
    ("users-320tb", "DeepSeek-V3 bf16 tb", 70, 0.5),
    ("users-320tb", "DeepSeek-V3 fp8 tb", 35, 0.5),
    ("ttft-20x", "load_s", 2.71, 0.005),
    ("ttft-20x", "recompute_s", 54, 0.5),
    ("ttft-20x", "flop", 1.77e17, 0.005e17),
    ("ttft-20x", "utilisation", 0.41, 0.005),
    ("gpu-time-90", "decode_share", 0.056, 0.0005),
    ("gpu-time-90", "decode_s", 3.0, 0.05),
    ("tokens-per-dollar", "low", 0.61, 0.005),
    ("tokens-per-dollar", "high", 1.33, 0.005),
    ("tokens-per-dollar", "tenfold_low", 0.56, 0.005),
    ("tokens-per-dollar", "tenfold_high", 1.17, 0.005),
    ("tokens-per-dollar", "half_low", 0.12, 0.005),
    ("tokens-per-dollar", "half_high", 0.27, 0.005),
    ("tokens-per-dollar", "most_low", 0.44, 0.005),
    ("tokens-per-dollar", "most_high", 0.84, 0.005),
    ("fetch-rule", "a800_gb_per_s", 5.9, 0.05),
    ("fetch-rule", "h800_gb_per_s", 18.6, 0.05),
    ("break-even", "Llama-3.1-70B 8192", 8.5, 0.05),
    ("break-even", "DeepSeek-V3 131072", 0.7, 0.05),
    ("latency-1000x", "dram", 1000, 1e-6),
    ("latency-1000x", "cxl_low", 17, 0.5),
    ("latency-1000x", "cxl_high", 400, 1e-6),
    ("latency-slo", "gb", 1.31, 0.005),
    ("latency-slo", "transfer_ms", 94, 0.5),
    ("latency-slo", "share", 0.001, 0.0002),
    ("hbm", "h200_per_stack", 0.8, 1e-9),
    ("ddr5", "low", 44.8, 1e-9),
    ("ddr5", "high", 51.2, 1e-9),
    ("wear", "gb_per_s", 3.3, 0.05),
    ("wear", "tb_per_day", 283, 0.5),
    ("wear", "drives", 9, 0.3),
    ("wear", "latent_drives", 2, 0.1),
]


def test_each_claim_has_its_verdict_and_says_why():
    assert {claim.name: claim.work_out().verdict for claim in CLAIMS} == VERDICTS
    for claim in CLAIMS:
        explained = claim.work_out()
        assert explained.calculation
        assert explained.because
        assert {name for at, name, *_ in FIGURES if at == claim.name} <= set(explained.figures)


@pytest.mark.parametrize(("claim", "figure", "value", "tolerance"), FIGURES)
def test_each_figure_of_a_claim_has_its_independent_value(claim, figure, value, tolerance):
    assert find_claim(claim).work_out().figures[figure] == pytest.approx(value, abs=tolerance)


def test_an_unknown_claim_is_refused_with_similar_names():
    with pytest.raises(ConfigError, match=r"'ttft'.*ttft-20x"):
        find_claim("ttft")
    with pytest.raises(ConfigError, match=r"context-70b, .*wear"):
        find_claim("zzzzzz")


def test_the_claim_formulas_have_the_right_limits_and_monotonicity():
    assert tokens_per_dollar_gain(0, 1, 20, 0) == 0
    assert tokens_per_dollar_gain(0.5, 1, 1, 0) == 0
    assert tokens_per_dollar_gain(0.5, 1, 20, 0.5) < tokens_per_dollar_gain(0.5, 1, 20, 0.1)
    assert fetch_rule_bytes_per_s(8192, 8, 65_536, 1e15) < fetch_rule_bytes_per_s(
        8192, 8, 8192, 1e15
    )
