"""Which blocks of a request were used before, by which request, and how much came in between.

A chain is a path, and an id names a whole prefix. So whenever a block is used, everything in front
of it is used too: along a chain, the request that used a block last can only grow older. A chain
thus falls into a few runs of blocks, each last used by one earlier request, followed by blocks that
are new. All that LRU, retention and an oracle need to know is in those runs, and there are some
hundred thousand of them in a trace of forty million block accesses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.trace import Ints, Longs, Trace


class Reuse(NamedTuple):
    """`m` runs of blocks that were used before, by request, then from the head of the chain on."""

    request: Longs
    """[m] the request that uses the run again."""
    previous: Longs
    """[m] the request that used it last."""
    depth: Longs
    """[m] how many blocks of the chain are in front of the run."""
    blocks: Longs
    """[m] the length of the run."""
    newer: Longs
    """[m] how many other blocks were used since `previous` used the head of the run.

    Counted when `request` arrives, for chains that are touched tail to head; so block `k` of the
    run has `newer + k` blocks before it in the order of recency.
    """
    held: Longs
    """[m] how many blocks no request after `previous` had used when `request` arrived: the run is
    the front of them."""


def reuse(trace: Trace) -> Reuse:
    """Find the runs; a pass over the accesses in numpy, then one over the runs."""
    last = np.full(trace.unique, -1, np.int32)
    users = np.empty(trace.blocks, np.int32)
    starts = trace.starts.tolist()
    for request in range(trace.requests):
        at = slice(starts[request], starts[request + 1])
        chain = trace.ids[at]
        users[at] = last[chain]
        last[chain] = request
    heads, lengths = _runs(users, trace.starts)
    known = users[heads] >= 0
    heads, lengths = heads[known], lengths[known]
    request_of = np.searchsorted(trace.starts, heads, side="right") - 1
    previous = users[heads].astype(np.int64)
    newer, held = _recency(trace, request_of, previous, lengths)
    return Reuse(request_of, previous, heads - trace.starts[request_of], lengths, newer, held)


def _runs(users: Ints, starts: Longs) -> tuple[Longs, Longs]:
    """Where runs of equal users start, none crossing from one request to the next; how long."""
    total = len(users)
    if not total:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    begins = np.ones(total, np.bool_)
    np.not_equal(users[1:], users[:-1], out=begins[1:])
    begins[starts[:-1][np.diff(starts) > 0]] = True
    heads = np.flatnonzero(begins)
    return heads, np.diff(heads, append=total)


def _recency(
    trace: Trace, request_of: Longs, previous: Longs, lengths: Longs
) -> tuple[Longs, Longs]:
    """`newer` and `held` of each run, with a Fenwick tree over the requests.

    The tree counts for each request the blocks that it was the last to use. Requests that come
    later than the one being looked at lie behind it in the tree and don't disturb its sums.
    """
    owned = np.diff(trace.starts)
    held_by = owned.tolist()
    tree = _tree(owned)
    size = len(tree)
    seen = _seen_before(trace, request_of, lengths)
    newer, held = [], []
    for user, run, known in zip(previous.tolist(), lengths.tolist(), seen.tolist(), strict=True):
        older, at = 0, user + 1
        while at:
            older += tree[at]
            at &= at - 1
        newer.append(known - older)
        held.append(held_by[user])
        held_by[user] -= run
        at = user + 1
        while at < size:
            tree[at] -= run
            at += at & -at
    return np.array(newer, np.int64), np.array(held, np.int64)


def _tree(values: Longs) -> list[int]:
    """A Fenwick tree of these values, one-based."""
    sums = np.concatenate(([0], np.cumsum(values)))
    at = np.arange(len(values) + 1)
    tree: list[int] = (sums - sums[at - (at & -at)]).tolist()
    return tree


def _seen_before(trace: Trace, request_of: Longs, lengths: Longs) -> Longs:
    """For each run, how many different blocks there were when its request arrived."""
    known = np.bincount(request_of, weights=lengths, minlength=trace.requests).astype(np.int64)
    fresh = np.diff(trace.starts) - known
    return (np.cumsum(fresh) - fresh)[request_of]
