"""Runs: consecutive blocks of a trace that every request uses together, or not at all.

A simulation moves, keeps and evicts runs, each as one row of the index, and counts blocks. With a
leaf-first order that is exact: whoever evicts the tail of a run goes on with the rest of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.trace import Ints, Longs, Trace, offsets

LONGEST = 64
"""Blocks of a run at most, so that policies that count rows see rows of like size."""


class Runs(NamedTuple):
    """The chains of a trace in terms of runs; a request is a sequence of whole runs."""

    lengths: Ints
    """[runs] blocks of each run."""
    starts: Longs
    """[n + 1] where the runs of each request start in `ids`; the last is their number."""
    ids: Ints
    """[starts[n]] the runs of request `i`, head first, are `ids[starts[i] : starts[i + 1]]`."""

    def chain(self, request: int) -> list[int]:
        """Return the runs of one request, head first."""
        chain: list[int] = self.ids[self.starts[request] : self.starts[request + 1]].tolist()
        return chain

    def fronts(self) -> Ints:
        """[runs] the run in front of each, which has a smaller number; -1: none."""
        fronts = np.full(len(self.lengths), -1, np.int32)
        follows = np.ones(len(self.ids) + 1, bool)
        follows[self.starts] = False
        behind = np.flatnonzero(follows)
        fronts[self.ids[behind]] = self.ids[behind - 1]
        return fronts


def runs_of(trace: Trace, longest: int = LONGEST) -> Runs:
    """Cut the chains of a trace into runs of at most `longest` blocks.

    Ids are numbered as they first appear, so the blocks of a run have numbers in a row. A run ends
    where chains part, where a request ends, and where it would become too long.
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
