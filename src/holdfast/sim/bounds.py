"""Hit curves of a trace, independent of any ladder: exact LRU, Belady's bound, retention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.report import Row
from holdfast.sim.belady import OracleBound, belady
from holdfast.sim.curve import curve
from holdfast.sim.retention import RetentionPoint, retention
from holdfast.sim.reuse import reuse
from holdfast.sim.statistics import Statistics, statistics
from holdfast.sim.trace import Trace

TTLS_S = (60.0, 300.0, 600.0, 1_800.0, 3_600.0, 28_800.0)
"""Times to live of the retention curve."""

_CURVE_POINTS = 60
_BOUND_POINTS = 14


class StoreBounds(NamedTuple):
    """Token hit rates of one trace by capacity in blocks and by TTL, and its statistics."""

    lru: list[tuple[int, float]]
    bounds: list[OracleBound]
    retention: list[RetentionPoint]
    statistics: Statistics


def bounds(trace: Trace) -> StoreBounds:
    """Compute the exact curves of a trace."""
    runs = reuse(trace)
    exact = curve(trace, runs)
    unique = max(1, trace.unique)
    lru = [(c, exact.token_hit(c)) for c in _capacities(unique, _CURVE_POINTS)]
    bounds = belady(trace, _capacities(unique, _BOUND_POINTS), runs)
    ttls = [ttl for ttl in TTLS_S if ttl <= trace.span_s] or [TTLS_S[0]]
    return StoreBounds(lru, bounds, retention(trace, ttls, runs), statistics(trace, runs))


def bounds_figures(found: StoreBounds) -> list[Row]:
    """Return the curves as figures, with their `points`."""
    facts = found.statistics
    return [
        Row("sim.best.tokens", facts.infinite_token_hit, "share", {"blocks": facts.unique_blocks}),
        Row("sim.curve.lru", found.lru[-1][1], "share", {"points": found.lru}),
        Row(
            "sim.curve.belady",
            found.bounds[-1].token_hit,
            "share",
            {"points": [(bound.capacity_blocks, bound.token_hit) for bound in found.bounds]},
        ),
        Row(
            "sim.curve.retention",
            found.retention[-1].token_hit,
            "share",
            {
                "points": [(row.ttl_s, row.token_hit) for row in found.retention],
                "mean_blocks": [row.mean_blocks for row in found.retention],
                "peak_blocks": [row.peak_blocks for row in found.retention],
            },
        ),
        Row("sim.reuse.p50", facts.reuse_s.get("p50"), "s", {"quantiles": facts.reuse_s}),
    ]


def _capacities(largest: int, points: int) -> list[int]:
    """Return capacities from 1 to `largest`, spaced evenly on a logarithmic scale."""
    return sorted({int(blocks) for blocks in np.geomspace(1, largest, points).round()})
