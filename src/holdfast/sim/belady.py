"""Belady's bound: the hits of an oracle that evicts the block whose next use is furthest away.

Belady, "A study of replacement algorithms for a virtual-storage computer" (1966), for blocks of one
size. After each request the store keeps, of its blocks and those of the request, the ones with the
earliest next use. Blocks without a next use are not kept and need not be written. No block of a
request is evicted while the request is in flight. Blocks with the same next use belong to one
chain, and the deepest is evicted first; so no block is kept without its parent.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import Trace, share


class OracleBound(NamedTuple):
    """Upper bound of the hits of any policy at one capacity, as shares of tokens and blocks."""

    capacity_blocks: int
    token_hit: float
    block_hit: float


def belady(trace: Trace, capacities: list[int], runs: Reuse | None = None) -> list[OracleBound]:
    """Return the bound at each capacity; `runs` is `reuse(trace)` if the caller has it already.

    All blocks of a run have the same next use, so a run is evicted from its tail.
    """
    runs = reuse(trace) if runs is None else runs
    inputs = int(trace.input_tokens.sum())
    lengths = runs.blocks.tolist()
    by_request = np.searchsorted(runs.request, np.arange(trace.requests + 1)).tolist()
    order = np.argsort(runs.previous, kind="stable")
    written = order.tolist()
    by_previous = np.searchsorted(runs.previous[order], np.arange(trace.requests + 1)).tolist()
    bounds = []
    for capacity in capacities:
        if capacity < 0:
            raise ValueError(f"capacity of {capacity} blocks: give 0 or more")
        kept = [0] * len(lengths)  # held blocks of each run; in the end, those held at its next use
        latest: list[int] = []  # heap of held runs, negated: the one with the latest next use first
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
        blocks = trace.sum_by_request(runs.request, np.array(kept, np.int64))
        tokens = np.minimum(blocks * trace.block_tokens, trace.input_tokens)
        token_hit = share(int(tokens.sum()), inputs)
        block_hit = share(int(blocks.sum()), trace.blocks)
        bounds.append(OracleBound(capacity, token_hit, block_hit))
    return bounds
