"""Runs of a trace: consecutive blocks that each request uses all or none of.

A simulation reads, saves and evicts runs, each as one row of the index, and counts blocks. This is
exact for leaf-first eviction orders, which evict a run's blocks one after the other from its tail.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.trace import Ints, Longs, Trace, offsets, previous_ids

MAX_RUN_BLOCKS = 64
"""Default limit of blocks per run, so that policies that count rows see rows of similar size."""


class Runs(NamedTuple):
    """The chains of a trace as runs; the chain of a request is a sequence of whole runs."""

    lengths: Ints
    """[runs] number of blocks of each run."""
    starts: Longs
    """[n + 1] start of each request's runs in `ids`; the last entry is the number of ids."""
    ids: Ints
    """[starts[n]] the runs of request `i`, head first, are `ids[starts[i] : starts[i + 1]]`."""

    def chain(self, request: int) -> list[int]:
        """Return the runs of one request, head first."""
        chain: list[int] = self.ids[self.starts[request] : self.starts[request + 1]].tolist()
        return chain

    def parents(self) -> Ints:
        """Return, for each run, the run before it, which has a smaller number; -1 for none."""
        parents = np.empty(len(self.lengths), np.int32)
        parents[self.ids] = previous_ids(self.starts, self.ids)
        return parents


def runs_of(trace: Trace, longest: int = MAX_RUN_BLOCKS) -> Runs:
    """Cut the chains of a trace into runs of at most `longest` blocks.

    Ids are numbered by first appearance, so the blocks of a run have consecutive ids. A run ends
    where chains branch, where a request ends, and at `longest` blocks.
    """
    parents, unique = trace.parents(), trace.unique
    children = np.bincount(parents[parents >= 0], minlength=unique)
    ends = children != 1
    whole = np.diff(trace.starts) > 0
    ends[trace.ids[trace.starts[1:][whole] - 1]] = True
    heads = np.ones(unique, bool)
    follows = parents[1:] == np.arange(unique - 1)
    heads[1:] = ~follows | ends[:-1]
    first = np.flatnonzero(heads)
    place = np.arange(unique) - np.repeat(first, np.diff(np.append(first, unique)))
    heads |= place % longest == 0
    first = np.flatnonzero(heads)
    lengths = np.diff(np.append(first, unique)).astype(np.int32)
    number = np.cumsum(heads, dtype=np.int32) - 1
    begins = heads[trace.ids]
    before = offsets(begins.astype(np.int64))
    return Runs(lengths, before[trace.starts], number[trace.ids[begins]])
