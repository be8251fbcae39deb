"""What is known of a request, or of a chain brought up ahead of one, while it is under way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.sim.fleet import Covered
from holdfast.sim.worker import Worker


class Flight:
    """One request between its arrival and its first token."""

    def __init__(
        self, worker: Worker, keys: list[bytes], lengths: list[int], covered: Covered
    ) -> None:
        self.worker = worker
        self.keys = keys
        self.lengths = lengths
        """Blocks of each run of the chain."""
        self.covered = covered
        self.blocks = 0
        """How many leading blocks are fetched."""
        self.moving = 0
        """Transfers under way."""
        self.ready_s = 0.0
        self.late_s = math.inf
        self.tokens = 0
        self.computed_tokens = 0
        self.compute_s = 0.0

    def counts(self, tiers: int) -> list[int]:
        """Return how many blocks are fetched from each of so many tiers."""
        taken = self.covered.tiers[: self.blocks]
        return [taken.count(tier) for tier in range(tiers)] if taken else [0] * tiers

    def sources(self) -> list[int]:
        """Return the tier that the last block of each run came from, of those that came whole."""
        tiers, blocks, end, sources = self.covered.tiers, self.blocks, 0, []
        for length in self.lengths:
            end += length
            if end > blocks:
                break
            sources.append(tiers[end - 1])
        return sources


class Staging(Flight):
    """A chain on its way to its worker's memory, before the request that will need it."""

    needed_s = math.inf

    def brought(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return the rows of the chain that have come, and how many blocks of each."""
        left, brought = self.blocks, []
        for row, length in zip(rows, self.lengths, strict=True):
            if left <= 0:
                break
            brought.append((row, min(left, length)))
            left -= length
        return brought
