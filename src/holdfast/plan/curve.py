"""The exact hit curve of an LRU store: its hits at every capacity, in one pass.

Mattson et al., "Evaluation techniques for storage hierarchies" (1970): an LRU store of `c` blocks
holds the `c` most recently used blocks, so an access hits if fewer than `c` other blocks were used
since the block's last use. The blocks of a request are touched tail to head, so that leaves are
evicted before their parents. A request is looked up in the state at its arrival, and only the
blocks of its input enter the store.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from holdfast.plan.reuse import BlockAccesses, Longs, Reuse, reuse


class ReuseOrder(enum.Enum):
    """Order in which the blocks of a request are touched; the last one is the most recent."""

    LEAF_FIRST = "tail to head: leaves are evicted before their parents"
    HEAD_FIRST = "head to tail: the head is evicted first, and the blocks after it are lost with it"


class HitCurve(NamedTuple):
    """Hits by capacity: a store of `c` blocks has `hit_blocks[c]` and `hit_tokens[c]`.

    `c` goes from 0 to the number of distinct blocks; larger stores hit no more.
    """

    blocks: int
    """Number of block accesses."""
    tokens: int
    """Number of input tokens."""
    hit_blocks: Longs
    hit_tokens: Longs

    def token_hit(self, capacity_blocks: int) -> float:
        """Return the share of input tokens that hit at this capacity."""
        return self._share(self.hit_tokens, capacity_blocks, self.tokens)

    def block_hit(self, capacity_blocks: int) -> float:
        """Return the share of block accesses that hit at this capacity."""
        return self._share(self.hit_blocks, capacity_blocks, self.blocks)

    def capacity_for(self, hit_share: float) -> int:
        """Return the smallest capacity with this share of an infinite store's token hits."""
        return int(np.searchsorted(self.hit_tokens, hit_share * float(self.hit_tokens[-1])))

    @staticmethod
    def _share(hits: Longs, capacity_blocks: int, whole: int) -> float:
        if capacity_blocks < 0:
            raise ValueError(f"capacity of {capacity_blocks} blocks: give 0 or more")
        return float(hits[min(capacity_blocks, len(hits) - 1)]) / whole if whole else 0.0


def curve(
    trace: BlockAccesses, runs: Reuse | None = None, order: ReuseOrder = ReuseOrder.LEAF_FIRST
) -> HitCurve:
    """Return the hit curve; `runs` is `reuse(trace)` if the caller has it already."""
    runs = reuse(trace) if runs is None else runs
    change = np.zeros(trace.unique + 2, np.int64)  # difference in hits to the next smaller capacity
    if order is ReuseOrder.LEAF_FIRST:
        np.add.at(change, runs.distance + 1, 1)
        np.add.at(change, np.minimum(runs.distance + runs.blocks + 1, trace.unique + 1), -1)
        last_at = runs.distance + runs.blocks
        hits = np.cumsum(np.cumsum(change)[:-1])
    else:
        last_at = runs.distance + runs.held  # the head is the oldest of `held`
        np.add.at(change, last_at, runs.blocks)
        hits = np.cumsum(change)[:-1]
    tokens = hits * trace.block_tokens
    lengths = np.diff(trace.starts)
    short = lengths * trace.block_tokens - trace.input_tokens  # tokens that a partial block lacks
    ends = runs.depth + runs.blocks == lengths[runs.request]
    at = np.flatnonzero(ends & (short[runs.request] > 0))
    lost = np.zeros(trace.unique + 1, np.int64)
    np.add.at(lost, last_at[at], short[runs.request[at]])
    return HitCurve(trace.blocks, int(trace.input_tokens.sum()), hits, tokens - np.cumsum(lost))
