"""The oracle's bound: what a store hits that keeps what is needed soonest.

Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), over blocks of
one size: after each request the store keeps, of what it held and the blocks of that request, those
whose next use comes first. What is never used again isn't kept, and need not even be written. No
block of a request is evicted while the request is in flight. Of blocks with the same next use,
which is a request that uses one chain, the deepest go first; so no block is kept without what it
builds upon.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import Trace


class Bound(NamedTuple):
    """The most blocks that any policy can hit in a store of this many, and the tokens in them."""

    capacity_blocks: int
    token_hit: float
    block_hit: float


def belady(trace: Trace, capacities: list[int], runs: Reuse | None = None) -> list[Bound]:
    """The bound at each of these capacities; `runs` are those of `reuse(trace)`, if known.

    A run of blocks is kept or dropped from its end, because all of it has the same next use.
    """
    runs = reuse(trace) if runs is None else runs
    inputs = int(trace.input_tokens.sum())
    bounds = []
    for capacity in capacities:
        if capacity < 0:
            raise ValueError(f"capacity of {capacity} blocks: give 0 or more")
        kept = np.array(_kept(trace, runs, capacity), np.int64)
        blocks = np.bincount(runs.request, weights=kept, minlength=trace.requests).astype(np.int64)
        tokens = np.minimum(blocks * trace.block_tokens, trace.input_tokens)
        hit = int(tokens.sum()) / inputs if inputs else 0.0
        share = int(blocks.sum()) / trace.blocks if trace.blocks else 0.0
        bounds.append(Bound(capacity, hit, share))
    return bounds


def _kept(trace: Trace, runs: Reuse, capacity: int) -> list[int]:
    """How many blocks of each run are still there when they are used again."""
    lengths = runs.blocks.tolist()
    by_request = np.searchsorted(runs.request, np.arange(trace.requests + 1)).tolist()
    order = np.argsort(runs.previous, kind="stable")
    written = order.tolist()
    by_previous = np.searchsorted(runs.previous[order], np.arange(trace.requests + 1)).tolist()
    kept = [0] * len(lengths)
    latest: list[int] = []  # runs in the store, negative: the last run of the latest request first
    free = capacity
    for request in range(trace.requests):
        for run in range(by_request[request], by_request[request + 1]):
            free += kept[run]
        for run in written[by_previous[request] : by_previous[request + 1]]:
            kept[run] = lengths[run]
            free -= lengths[run]
            heapq.heappush(latest, -run)
        while free < 0:
            run = -latest[0]
            gone = min(kept[run], -free)
            kept[run] -= gone
            free += gone
            if not kept[run]:
                heapq.heappop(latest)
    return kept
