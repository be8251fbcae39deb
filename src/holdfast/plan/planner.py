"""Decide how much of what is held is worth fetching.

This first planner fetches what is held and expected to land within the deadline, judged by the
bandwidth each tier has shown lately. A cost model that weighs fetching against recomputing comes
behind the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.index.residency import Coverage


class Speed(NamedTuple):
    """What a tier has shown lately: seconds before the first byte, then bytes per second."""

    latency_s: float
    bytes_per_s: float


class Plan(NamedTuple):
    """Fetch the first `blocks` of a coverage, recompute the rest; `reason` is one line."""

    blocks: int
    expected_s: float
    reason: str


class Planner(Protocol):
    """Anything that turns coverage into a plan; pure."""

    def plan(self, coverage: Coverage, deadline_s: float, speeds: Sequence[Speed]) -> Plan:
        """Return the cut; `speeds[i]` belongs to tier `i`, 0 the fastest."""
        ...


class FetchHeld:
    """Fetch every held block that the deadline leaves time for."""

    def plan(self, coverage: Coverage, deadline_s: float, speeds: Sequence[Speed]) -> Plan:
        """Return the longest prefix whose expected time is within the deadline."""
        nbytes = coverage.world.record_bytes
        per_block = [nbytes / speed.bytes_per_s for speed in speeds]
        expected_s, started = 0.0, [False] * len(speeds)
        for i, tier in enumerate(coverage.tiers):
            step_s = per_block[tier] + (0.0 if started[tier] else speeds[tier].latency_s)
            if expected_s + step_s > deadline_s:
                return Plan(
                    i,
                    expected_s,
                    f"fetch {i} of {coverage.blocks} blocks: {expected_s:.3f} s; "
                    f"the rest would pass the deadline of {deadline_s:.3f} s",
                )
            expected_s += step_s
            started[tier] = True
        return Plan(
            coverage.blocks, expected_s, f"fetch all {coverage.blocks} blocks: {expected_s:.3f} s"
        )
