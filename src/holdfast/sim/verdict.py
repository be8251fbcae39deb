"""The verdict on a simulated ladder: whether it pays, and what to look at."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.report import Row

_SLOWER = 1.01
"""Ratio of times to first token above which a ladder counts as slower than computing everything.

Below the inverse it counts as faster.
"""


def verdict(figures: Sequence[Row]) -> list[str]:
    """Return sentences: whether the ladder pays, how near it is to the best, and warnings."""
    named = {figure.what: figure for figure in figures}
    median, slowest = named["sim.ttft.p50"], named["sim.ttft.p99"]
    hit = named["sim.hit.tokens"].value
    parts = [f"{hit or 0.0:.1%} of the input comes from tiers"]
    if median.value is not None and slowest.value is not None:
        parts.append(
            f"the first token takes {_change(median)} (median) and {_change(slowest)} (99%)"
        )
    cost = named.get("sim.cost.per_million_out")
    bare = named.get("sim.cost.without_ladder")
    ratios = [_ratio(median), _ratio(slowest)]
    faster = max(ratios) <= _SLOWER and min(ratios) < 1 / _SLOWER
    conclusion = "This ladder saves time" if faster else "This ladder does not save time"
    if cost is not None and bare is not None and cost.value is not None and bare.value:
        change = cost.value / bare.value - 1
        parts.append(
            f"a million output tokens cost ${cost.value:,.2f} instead of ${bare.value:,.2f} "
            f"({abs(change):.0%} {'less' if change < 0 else 'more'})"
        )
        conclusion = {
            (True, True): "This ladder pays",
            (True, False): "This ladder saves money but not time",
            (False, True): "This ladder costs money and saves time",
            (False, False): "This ladder does not pay",
        }[change < 0, faster]
    lines = [f"{conclusion}: {'; '.join(parts)}."]
    best = named["sim.best.tokens"].value
    if best and hit is not None:
        lines.append(f"Unlimited capacity would serve {best:.1%}; this is {hit / best:.0%} of it.")
    # What would fail in operation: too few engines, worn drives, late fetches.
    for figure in figures:
        value = figure.value or 0.0
        if figure.what == "sim.gpu.busy" and value > 1:
            lines.append(
                f"Too few workers: prefill and decoding need {value:.2f} times the engines there "
                "are, so real answers would be later."
            )
        rated = figure.more.get("rated")
        if isinstance(rated, float | int) and value > rated:
            name = figure.what.rpartition(".")[2]
            lines.append(
                f"The {name} tier wears out early: {value:.3g} drive writes a day at the rate "
                f"of this trace, rated for {rated:g}. Limit it with `writes_per_day`, or buy more "
                "or more durable drives."
            )
        if figure.what == "sim.late" and value:
            lines.append(f"{value:,.0f} fetches missed their deadline and were computed instead.")
    return lines


def _change(ttft: Row) -> str:
    return f"{ttft.value:.2f} s instead of {ttft.more['without_ladder_s']:.2f} s"


def _ratio(ttft: Row) -> float:
    """Return the time to first token over that without the ladder; 1 if one is unknown."""
    without = ttft.more["without_ladder_s"]
    if ttft.value is None or not isinstance(without, float) or not without:
        return 1.0
    return ttft.value / without
