"""Charts of a simulation: hits by capacity, times to first token, hits over time."""

from __future__ import annotations

import numpy as np

from holdfast.sim.bounds import StoreBounds
from holdfast.sim.chart import Axis, Series, chart
from holdfast.sim.figures import SimulationFigures
from holdfast.sim.served import ServedRequests

_POINTS = 80
_BINS = 30
_SHORTEST_S = 1e-3


def capacity_chart(run: SimulationFigures, found: StoreBounds) -> str:
    """Return the chart of hits by capacity: exact LRU, Belady's bound, and this ladder."""
    blocks = sum(
        min(tier_state.capacity, found.statistics.unique_blocks)
        for tier in range(len(run.fleet.names))
        for tier_state in run.fleet.tier_states(tier)
    )
    here = (float(blocks), 100.0 * run.requests.token_hit(run.trace))
    return chart(
        f"{run.trace.name}: hits by capacity",
        Axis(f"capacity, blocks of {run.trace.block_tokens} tokens", log=True),
        Axis("input tokens served, %"),
        [
            Series("LRU, exact", [(blocks, 100.0 * hit) for blocks, hit in found.lru]),
            Series(
                "oracle's bound",
                [(float(b.capacity_blocks), 100.0 * b.token_hit) for b in found.bounds],
            ),
            Series("this ladder, all tiers", [here], "points", [f"{here[1]:.1f} %"]),
        ],
    )


def time_chart(run: SimulationFigures) -> str:
    """Return the chart of the cumulative distribution of time to first token."""
    return chart(
        "Time to the first token",
        Axis("seconds", log=True),
        Axis("requests, %"),
        [
            Series("with the ladder", _waits(run.requests)),
            Series("without: all of it computed", _waits(run.bare)),
        ],
    )


def history_chart(run: SimulationFigures) -> str:
    """Return the chart of the share of input that each tier served, over time."""
    found, trace = run.requests, run.trace
    bins = min(_BINS, max(1, trace.requests // 20))
    edges = np.linspace(0.0, float(found.arrived_s.max(initial=0.0)) + 1e-9, bins + 1)
    place = np.clip(np.searchsorted(edges, found.arrived_s, side="right") - 1, 0, bins - 1)
    inputs = np.bincount(place, weights=trace.input_tokens, minlength=bins)
    series = []
    for tier, name in enumerate(run.fleet.names):
        tokens = found.fetched[:, tier] * trace.block_tokens
        share = 100.0 * np.bincount(place, weights=tokens, minlength=bins) / np.maximum(inputs, 1)
        points = list(zip((edges[1:] / 60.0).tolist(), share.tolist(), strict=True))
        series.append(Series(name, points))
    return chart(
        "Where the input came from", Axis("minutes from the start"), Axis("input tokens, %"), series
    )


def retention_chart(found: StoreBounds) -> str:
    """Return the chart of hits by TTL, with unlimited capacity."""
    points = [(row.ttl_s, 100.0 * row.token_hit) for row in found.retention]
    notes = [f"{row.peak_blocks:,} blocks" for row in found.retention]
    return chart(
        "Hits by time of retention",
        Axis("seconds kept after the last use", log=True),
        Axis("input tokens served, %"),
        [Series("sliding time to live; blocks at the peak", points, "line", notes)],
    )


def _waits(found: ServedRequests) -> list[tuple[float, float]]:
    """Return (seconds, per cent of requests whose first token came within them)."""
    ttft = np.maximum(found.first_s - found.arrived_s, _SHORTEST_S)
    shares = np.linspace(0.0, 1.0, _POINTS)
    waits = np.quantile(ttft, shares) if len(ttft) else np.full(_POINTS, _SHORTEST_S)
    return list(zip(waits.tolist(), (100.0 * shares).tolist(), strict=True))
