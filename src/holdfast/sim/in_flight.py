"""State of a request, or of a prestaged chain, while it is in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.sim.fleet import FleetCoverage
from holdfast.sim.worker import SimulatedWorker


class InflightRequest:
    """One request between its arrival and its first token."""

    def __init__(
        self, worker: SimulatedWorker, keys: list[bytes], lengths: list[int], covered: FleetCoverage
    ) -> None:
        self.worker = worker
        self.keys = keys
        self.lengths = lengths
        """Number of blocks in each run of the chain."""
        self.covered = covered
        self.blocks = 0
        """Number of leading blocks to fetch."""
        self.moving = 0
        """Number of running transfers."""
        self.ready_s = 0.0
        self.late_s = math.inf
        self.tokens = 0
        self.computed_tokens = 0
        self.compute_s = 0.0

    def counts(self, tiers: int) -> list[int]:
        """Return the number of blocks fetched from each of `tiers` tiers."""
        taken = self.covered.tiers[: self.blocks]
        return [taken.count(tier) for tier in range(tiers)] if taken else [0] * tiers

    def sources(self) -> list[int]:
        """Return, for each run that was fetched whole, the tier its last block came from."""
        tiers, blocks, end, sources = self.covered.tiers, self.blocks, 0, []
        for length in self.lengths:
            end += length
            if end > blocks:
                break
            sources.append(tiers[end - 1])
        return sources


class InflightPrestage(InflightRequest):
    """A chain being prestaged into its worker's host memory for a later request."""

    needed_s = math.inf

    def arrived(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return (row, number of blocks) for each row of the chain that arrived."""
        left, arrived = self.blocks, []
        for row, length in zip(rows, self.lengths, strict=True):
            if left <= 0:
                break
            arrived.append((row, min(left, length)))
            left -= length
        return arrived
