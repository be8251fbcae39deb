"""The verdict on a ladder, from figures that are known."""

import pytest

from holdfast.report import Row
from holdfast.sim.verdict import verdict


def figures(median_s=0.4, slowest_s=4.0, dollars=None, *more):
    """Return the figures of a ladder; without it, first tokens take 1 s and 5 s, and cost $10."""
    costs = []
    if dollars is not None:
        costs = [
            Row("sim.cost.per_million_out", dollars, "$"),
            Row("sim.cost.without_ladder", 10.0, "$"),
        ]
    return [
        Row("sim.hit.tokens", 0.3, "share"),
        Row("sim.best.tokens", 0.4, "share"),
        Row("sim.ttft.p50", median_s, "s", {"without_ladder_s": 1.0}),
        Row("sim.ttft.p99", slowest_s, "s", {"without_ladder_s": 5.0}),
        *costs,
        *more,
    ]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (figures(dollars=8.0), "This ladder pays: 30.0% of the input"),
        (figures(slowest_s=6.0, dollars=8.0), "This ladder saves money but not time: "),
        (figures(dollars=12.5), "This ladder costs money and saves time: "),
        (figures(median_s=1.1, dollars=12.5), "This ladder does not pay: "),
        (figures(), "This ladder saves time: "),
        (figures(median_s=1.1), "This ladder does not save time: "),
        (figures(1.0, 5.0), "This ladder does not save time: "),
        (figures(1.0, 5.0, 8.0), "This ladder saves money but not time: "),
        (figures(None, None), "This ladder does not save time: "),
        (figures(1.0, 4.0), "This ladder saves time: "),
    ],
)
def test_the_first_sentence_weighs_time_and_money(found, says):
    assert verdict(found)[0].startswith(says)


def test_times_and_costs_stand_beside_those_without_the_ladder():
    first, best = verdict(figures(dollars=8.0))
    assert "0.40 s instead of 1.00 s (median) and 4.00 s instead of 5.00 s (99%)" in first
    assert "$8.00 instead of $10.00 (20% less)" in first
    assert best == "Unlimited capacity would serve 40.0%; this is 75% of it."


def test_the_verdict_names_overload_late_fetches_and_early_wear():
    found = figures(
        0.4,
        4.0,
        8.0,
        Row("sim.gpu.busy", 1.3, "engines"),
        Row("sim.late", 7.0, "requests"),
        Row("sim.writes_per_day.1.disk", 3.0, "drives", {"rated": 1.0}),
        Row("sim.writes_per_day.2.pool", 0.9, "drives", {"rated": 1.0}),
    )
    engines, late, wear = verdict(found)[2:]
    assert "1.30 times the engines" in engines
    assert late.startswith("7 fetches missed their deadline")
    assert wear.startswith("The disk tier wears out early: 3 drive writes a day")
