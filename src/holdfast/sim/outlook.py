"""What any store could do with a trace: exact LRU by capacity, the oracle's bound, retention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.belady import Bound, belady
from holdfast.sim.curve import curve
from holdfast.sim.figures import Figure
from holdfast.sim.retention import Retention, retention
from holdfast.sim.reuse import reuse
from holdfast.sim.statistics import Statistics, statistics
from holdfast.sim.trace import Trace

TTLS_S = (60.0, 300.0, 600.0, 1_800.0, 3_600.0, 28_800.0)
_CURVE_POINTS = 60
_BOUND_POINTS = 14


class Outlook(NamedTuple):
    """Curves of one trace: token hit rates by blocks of capacity and by seconds of retention."""

    lru: list[tuple[int, float]]
    bounds: list[Bound]
    retention: list[Retention]
    statistics: Statistics


def outlook(trace: Trace) -> Outlook:
    """Work out the curves of a trace; exact, and independent of any ladder."""
    runs = reuse(trace)
    exact = curve(trace, runs)
    unique = max(1, trace.unique)
    capacities = _spread(unique, _CURVE_POINTS)
    lru = [(blocks, exact.token_hit(blocks)) for blocks in capacities]
    bounds = belady(trace, _spread(unique, _BOUND_POINTS), runs)
    ttls = [ttl for ttl in TTLS_S if ttl <= trace.span_s] or [TTLS_S[0]]
    return Outlook(lru, bounds, retention(trace, ttls, runs), statistics(trace, runs))


def outlook_figures(found: Outlook) -> list[Figure]:
    """Return the curves as figures; `points` hold them."""
    facts = found.statistics
    return [
        Figure(
            "sim.best.tokens", facts.infinite_token_hit, "share", {"blocks": facts.unique_blocks}
        ),
        Figure("sim.curve.lru", _last(found.lru), "share", {"points": found.lru}),
        Figure(
            "sim.curve.belady",
            found.bounds[-1].token_hit if found.bounds else None,
            "share",
            {"points": [(bound.capacity_blocks, bound.token_hit) for bound in found.bounds]},
        ),
        Figure(
            "sim.curve.retention",
            found.retention[-1].token_hit,
            "share",
            {
                "points": [(row.ttl_s, row.token_hit) for row in found.retention],
                "mean_blocks": [row.mean_blocks for row in found.retention],
                "peak_blocks": [row.peak_blocks for row in found.retention],
            },
        ),
        Figure("sim.reuse.p50", facts.reuse_s.get("p50"), "s", {"quantiles": facts.reuse_s}),
    ]


def _spread(most: int, points: int) -> list[int]:
    """Return capacities from 1 to `most`, evenly by their ratio."""
    return sorted({int(blocks) for blocks in np.geomspace(1, most, points).round()})


def _last(points: list[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None
