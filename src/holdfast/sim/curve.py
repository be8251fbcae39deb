"""The exact hit rate of an LRU store at every capacity at once.

Mattson et al., "Evaluation techniques for storage hierarchies" (1970): an LRU store of `c` blocks
holds the `c` most recently used ones, so a block is found if fewer than `c` others were used since.
Here the blocks of a request are touched tail to head, so that leaves go before what they build
upon; a request is looked up against the state at its arrival, and only blocks of its input enter.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import Longs, Trace


class Order(enum.Enum):
    """In which order the blocks of a request are touched: the last touched is the most recent."""

    LEAF_FIRST = "tail to head: leaves are evicted before what they build upon"
    HEAD_FIRST = "head to tail: the head is evicted first, and what is behind it is lost with it"


class Curve(NamedTuple):
    """Hits by capacity. `hit_blocks[c]` and `hit_tokens[c]` are those of a store of `c` blocks.

    `c` runs from 0 to the number of different blocks in the trace; more space changes nothing.
    """

    blocks: int
    """Block accesses in all."""
    tokens: int
    """Input tokens in all."""
    hit_blocks: Longs
    hit_tokens: Longs

    def token_hit(self, capacity_blocks: int) -> float:
        """The share of all input tokens that a store of this size serves."""
        return self._share(self.hit_tokens, capacity_blocks, self.tokens)

    def block_hit(self, capacity_blocks: int) -> float:
        """The share of all block accesses that a store of this size serves."""
        return self._share(self.hit_blocks, capacity_blocks, self.blocks)

    def capacity_for(self, share: float) -> int:
        """The fewest blocks that give this share of the token hits of a store without end."""
        return int(np.searchsorted(self.hit_tokens, share * float(self.hit_tokens[-1])))

    @staticmethod
    def _share(hits: Longs, capacity_blocks: int, whole: int) -> float:
        if capacity_blocks < 0:
            raise ValueError(f"capacity of {capacity_blocks} blocks: give 0 or more")
        return float(hits[min(capacity_blocks, len(hits) - 1)]) / whole if whole else 0.0


def curve(trace: Trace, runs: Reuse | None = None, order: Order = Order.LEAF_FIRST) -> Curve:
    """Count the hits of every capacity at once; `runs` are those of `reuse(trace)`, if known."""
    runs = reuse(trace) if runs is None else runs
    change = np.zeros(trace.unique + 2, np.int64)  # of the number of hits per block more of space
    if order is Order.LEAF_FIRST:
        np.add.at(change, runs.newer + 1, 1)
        np.add.at(change, np.minimum(runs.newer + runs.blocks + 1, trace.unique + 1), -1)
        last_at = runs.newer + runs.blocks
        hits = np.cumsum(np.cumsum(change)[:-1])
    else:
        last_at = runs.newer + runs.held  # the head of a run is the oldest of what is held with it
        np.add.at(change, last_at, runs.blocks)
        hits = np.cumsum(change)[:-1]
    tokens = hits * trace.block_tokens
    short, at = _missing_tokens(trace, runs)
    lost = np.zeros(trace.unique + 1, np.int64)
    np.add.at(lost, last_at[at], short)
    return Curve(trace.blocks, int(trace.input_tokens.sum()), hits, tokens - np.cumsum(lost))


def _missing_tokens(trace: Trace, runs: Reuse) -> tuple[Longs, Longs]:
    """How many tokens the last, partial block of a request lacks, for the runs that end in one."""
    lengths = np.diff(trace.starts)
    short = lengths * trace.block_tokens - trace.input_tokens
    ends = runs.depth + runs.blocks == lengths[runs.request]
    at = np.flatnonzero(ends & (short[runs.request] > 0))
    return short[runs.request[at]], at
