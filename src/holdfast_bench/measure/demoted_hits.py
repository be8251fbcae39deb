"""Simulate what demotion from a disk to an object tier adds to the hits of public agent traces.

Three ladders with the same memory serve a trace: a disk; the disk and an object tier that takes
what the disk evicts; and one disk of the summed capacity. The object tier should make up for the
disk that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from holdfast.plan.planner import FetchHeld
from holdfast.report import Row
from holdfast.sim.fleet import Fleet
from holdfast.sim.formats.load import load
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.shipped import find_trace
from holdfast.sim.trace import Longs, Trace, share

AGENTS = ("claude-code",)
"""The traces of agents that are long enough to fill two tiers."""

GOAL = 0.98
TOTAL_SHARE = 0.1
"""Both lower tiers together, as a share of the distinct blocks of a trace."""

HOST_SHARE, DISK_SHARE = 0.1, 0.3
"""Memory and the disk, as shares of both lower tiers together."""


class LadderBlocks(NamedTuple):
    """Capacities in blocks: memory, a disk, and the tier that takes what the disk evicts."""

    host: int
    disk: int
    far: int

    @classmethod
    def of(cls, trace: Trace) -> LadderBlocks:
        """Return the ladder whose sizes are the shares above of a trace's distinct blocks."""
        total = int(TOTAL_SHARE * trace.unique)
        disk = max(1, int(DISK_SHARE * total))
        return cls(max(1, int(HOST_SHARE * total)), disk, max(1, total - disk))


class DemotedHits(NamedTuple):
    """Token hits of a trace: a disk alone, with an object tier below it, and one larger disk."""

    alone: float
    demoted: float
    summed: float


def demoted_hits(trace: Trace, blocks: LadderBlocks) -> DemotedHits:
    """Serve a trace with each of the three ladders."""
    below = _tier(trace, "object", blocks.far, write="on_eviction", admit_evicted="always")
    ladders = [
        [_tier(trace, "disk", blocks.disk)],
        [_tier(trace, "disk", blocks.disk), below],
        [_tier(trace, "disk", blocks.disk + blocks.far)],
    ]
    host = _tier(trace, "host", blocks.host)
    return DemotedHits(*(_simulated_hit(trace, [host, *tiers]) for tiers in ladders))


def hits_rows(traces: list[str]) -> Iterator[Row]:
    """Yield a row for each trace, by the name that `holdfast sim` knows it by.

    Traces of agents have a goal.
    """
    for name in traces:
        trace = load(find_trace(name))
        found = demoted_hits(trace, LadderBlocks.of(trace))
        ratio = found.demoted / found.summed
        yield Row(
            f"movement.hits.{name}",
            found.demoted,
            "token hit",
            limit=found.summed,
            ratio=ratio,
            goal=GOAL if name in AGENTS else None,
            ok=ratio >= GOAL if name in AGENTS else None,
            more={"disk_alone": found.alone, "limit_is": "one disk of the summed capacity"},
        )


def token_hit(trace: Trace, fetched: Longs) -> float:
    """Return the share of the input tokens that tiers serve: `fetched` blocks of each request."""
    tokens = np.minimum(fetched * trace.block_tokens, trace.input_tokens)
    return share(float(tokens.sum()), int(trace.input_tokens.sum()))


def _tier(trace: Trace, kind: str, blocks: int, **more: object) -> dict[str, Any]:
    return {"kind": kind, "capacity_tokens": trace.block_tokens * blocks, **more}


def _simulated_hit(trace: Trace, tiers: list[dict[str, Any]]) -> float:
    ladder = parse_ladder({"tiers": tiers, "engine": {"prefill": {}}, "token_bytes": 100})
    hardware = resolve(ladder, shipped(), trace.block_tokens)
    setting = SimulationSettings(FetchHeld(), ROUTERS["round_robin"])
    served = Simulation(trace, Fleet(hardware, 1, rules_of(hardware)), setting).run()
    return token_hit(trace, served.fetched.sum(axis=1))
