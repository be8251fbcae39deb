"""`holdfast inspect plans` in words."""

import pytest

from holdfast.cli.inspect import plans_text
from holdfast.errors import NotFollowed
from holdfast.status import read_plans

RIGHT = {
    "ended": 0,
    "within_25_percent": 0,
    "median_error": None,
    "late": 0,
    "not_followed": 0,
}
PLAN = {
    "plan": 5,
    "age_s": 12.0,
    "engine": "vllm",
    "prompt_tokens": 3000,
    "have_tokens": 0,
    "reason": "fetch 23 of 23 blocks from host: 8.68 s against 16.04 s",
    "expected": {"fetched_s": 0.1, "first_token_s": 8.68},
    "actual": {"fetched_s": None, "first_token_s": 0.3},
    "recompute_s": 16.04,
    "landed_blocks": None,
    "outcome": "",
    "not_followed": None,
}


def text_of(tiers=(), engines=(), plans=(), **right):
    data = {"tiers": tiers, "engines": engines, "plans": plans, "right": RIGHT | right}
    return plans_text(read_plans(data)).splitlines()


def test_no_accuracy_is_shown_if_no_plan_with_an_expectation_has_ended():
    assert text_of()[0] == "  no plan with an expectation has ended yet"


def test_a_plan_not_carried_out_is_shown_with_its_reason_and_not_counted():
    lines = text_of(plans=[PLAN | {"not_followed": "engine_had_it"}], not_followed=1)
    assert lines == [
        "  no plan with an expectation has ended yet",
        "  1 plan not carried out, and not counted",
        "",
        "#5 12 s ago, vllm, 3,000 tokens: fetch 23 of 23 blocks from host: 8.68 s against 16.04 s",
        "    not carried out: the engine had more than it had reported; first token after 0.30 s",
    ]
    assert text_of(plans=[PLAN])[-1] == "    first token after 0.30 s (expected 8.68 s)"


@pytest.mark.parametrize("why", [*NotFollowed, "what a newer node says"])
def test_every_reason_has_words(why):
    line = text_of(plans=[PLAN | {"not_followed": str(why)}])[-1]
    assert line.startswith("    not carried out: the ")
    assert "_" not in line


def test_plans_of_an_older_node_are_shown_without_the_newer_fields():
    older = {key: value for key, value in PLAN.items() if key != "not_followed"}
    right = {key: value for key, value in RIGHT.items() if key != "not_followed"}
    text = plans_text(read_plans({"tiers": [], "engines": [], "plans": [older], "right": right}))
    assert "not carried out" not in text


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (
            {"a": 8.1e-3, "b": 3.3e-3, "c": 3.34e-6},
            "3.3 ms a token, 3.3 ms more a token for every 1,000 tokens before it, 8.1 ms a step",
        ),
        (
            {"a": 0.25, "b": 2.2e-5, "c": 1.42e-11},
            "22 us a token, 0.014 us more a token for every 1,000 tokens before it, 0.25 s a step",
        ),
        (
            {"a": 0.0, "b": 0.5, "c": 0.0},
            "0.50 s a token, 0 ms more a token for every 1,000 tokens before it, 0 ms a step",
        ),
    ],
)
def test_prefill_costs_are_shown_in_readable_units(cost, words):
    engine = {"engine": "vllm", "fingerprint": "3fa09c11" * 4, "steps": 46, "cost": cost}
    assert text_of(engines=[engine])[0] == f"  vllm 3fa09c11: {words} (46 steps)"


@pytest.mark.parametrize(
    ("bytes_per_s", "latency_s", "words"),
    [
        (6e9, 0.0, "6.00 GB/s after 0 ms"),
        (4.2e6, 2e-5, "4.2 MB/s after 20 us"),
        (1e9, 0.0999, "1.00 GB/s after 0.10 s"),
    ],
)
def test_tier_bandwidth_and_latency_are_shown_in_readable_units(bytes_per_s, latency_s, words):
    tier = {"tier": "disk", "bytes_per_s": bytes_per_s, "latency_s": latency_s}
    lines = text_of(tiers=[tier | {"queued_bytes": 5 << 20, "reads": 1}])
    assert lines[0] == f"  disk     {words}, 5 MiB queued (1 read)"
