"""Figures of a run say what they are of, and add up."""

import pytest

from holdfast.sim.figures import time_figures, wear_figures

ENGINE = {"prefill": {"a": 1.0}, "decode_tokens_per_s": 10, "decodes_at_once": 1}
TIERS = [{"kind": "disk", "capacity_tokens": 400, "read_bytes_per_s": 1e9}]


@pytest.fixture
def crowded(made, ran):
    """Three requests at once, a second each to compute, whose answers take two seconds each."""
    trace = made([[0, 1], [0, 2], [0, 3]], [0, 0, 0], [0, 0, 0])
    trace = trace._replace(output_tokens=trace.output_tokens + 20)
    return ran(trace, {"engine": ENGINE, "tiers": TIERS, "token_bytes": 1_000})


def test_engine_use_above_100_percent_is_split_into_prefill_and_decode(crowded):
    found = {figure.what: figure for figure in time_figures(crowded)}
    busy = found["sim.gpu.busy"]
    assert crowded.span_s == 5.0  # the third is computed after 3 s and answered 2 s later
    assert (busy.value, busy.unit) == (pytest.approx(9 / 5), "of the engines there are")
    assert busy.more["prefill"] == pytest.approx(3 / 5)
    assert busy.more["decode"] == pytest.approx(6 / 5)
    assert busy.more["without_ladder"] == pytest.approx(9 / 5)
    assert found["sim.gpu.prefill"].value == pytest.approx(3.0)
    assert found["sim.gpu.decode"].value == pytest.approx(6.0)


def test_wear_is_stated_per_drive_bought_and_per_capacity(made, ran):
    trace = made([[0, 1], [2, 3]], [0, 0], [0, 86_399])
    tier = {"kind": "disk", "medium": "nvme-tlc", "units": 2, "capacity": 16_384}
    found = ran(trace, {"engine": ENGINE, "tiers": [tier], "token_bytes": 1_000})
    [wear] = wear_figures(found)
    written = found.tier_bytes(0)[1]
    assert written > 0
    assert found.span_s == 86_400.0
    assert (wear.value, wear.unit) == (pytest.approx(written / 61.44e12), "of the drives bought")
    assert wear.more["of_capacity"] == pytest.approx(
        written / found.fleet.hardware.tier_specs[0].nbytes
    )
    assert (wear.more["rated"], wear.more["measured_s"]) == (1.0, 86_400.0)


def test_wear_of_a_tier_without_a_medium_is_stated_per_capacity(crowded):
    [wear] = wear_figures(crowded)
    assert wear.unit == "of its capacity"
    assert wear.value == wear.more["of_capacity"]
