"""A trace: the requests of a recorded workload as flat columns, with the ids of their blocks.

Every loader in `sim/formats` makes one of these, and everything that replays, counts or simulates
reads nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
MICROS = 6
"""Decimals of a second that times keep: so that equal intervals are equal numbers."""

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class Trace(NamedTuple):
    """`n` requests in order of arrival, and the ids of the blocks of their inputs, end to end.

    A block is `block_tokens` tokens of a request's input. An id names a whole prefix, as a key
    does: the same id is the same block behind the same blocks. Ids are dense: 0 to `unique - 1`
    in order of first appearance, so a plain array can be indexed with them. The last block of a
    request may be partial where a trace lists partial blocks, and up to `block_tokens - 1` tokens
    at the end may have no block where it does not; so the tokens in the first `k` blocks of a
    request are `min(k * block_tokens, input_tokens)`.

    `session` says which requests belong to one conversation or agent run, sub-agents included.
    The arrays are shared, never copied: treat them as read-only.
    """

    name: str
    block_tokens: int
    time_s: Floats
    """[n] arrival in seconds, ascending, in whole microseconds; the first is 0."""
    input_tokens: Longs
    """[n] tokens of the prompt."""
    output_tokens: Longs
    """[n] tokens of the answer; 0 where unknown."""
    session: Ints
    """[n] 0, 1, ... ; -1 where unknown."""
    think_s: Floats
    """[n] seconds between the end of the session's answer before and this request; nan: unknown."""
    starts: Longs
    """[n + 1] where the ids of each request start in `ids`; the last is their number."""
    ids: Ints
    """[starts[n]] the blocks of request `i`, head first, are `ids[starts[i] : starts[i + 1]]`."""
    content: bool = True
    """Whether ids tell content; else they are made up, and only sessions are known to share it."""
    composed: bool = False
    """Whether sessions that were recorded one by one start at random within a window."""

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.time_s)

    @property
    def unique(self) -> int:
        """How many different blocks there are; one pass over `ids`."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @property
    def blocks(self) -> int:
        """How many block accesses there are: the blocks of all requests, repeats included."""
        return len(self.ids)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.time_s[-1]) if len(self.time_s) else 0.0

    def chain(self, request: int) -> Ints:
        """The ids of one request, head first: a view."""
        return self.ids[self.starts[request] : self.starts[request + 1]]

    def parents(self) -> Ints:
        """[unique] the id in front of each id, -1 for the head of a chain."""
        parents = np.empty(self.unique, np.int32)
        parents[self.ids] = _in_front(self.starts, self.ids)
        return parents


class Requests(NamedTuple):
    """What a loader knows about each request, in the order of its file; see `Trace` for units."""

    time_s: Floats
    input_tokens: Longs
    output_tokens: Longs
    session: Ints
    think_s: Floats

    def taken(self, order: Longs) -> Requests:
        """These of the requests, in this order."""
        return Requests(
            self.time_s[order],
            self.input_tokens[order],
            self.output_tokens[order],
            self.session[order],
            self.think_s[order],
        )


def arrange(
    name: str,
    block_tokens: int,
    requests: Requests,
    counts: Longs,
    ids: Longs | Ints,
) -> Trace:
    """Make a trace of requests in any order, whose ids are any integers.

    `counts[i]` ids of `ids` belong to request `i`. Requests are sorted by time, ties stay as they
    are; times then start at 0, and ids become dense. Where an id appears behind different ids, it
    names a block's own content rather than a whole prefix, and all are chained to name prefixes.
    """
    starts = offsets(counts)
    order = np.argsort(requests.time_s, kind="stable")
    if (np.diff(order) != 1).any():
        taken = counts[order]
        ids = ids[spread(starts[:-1][order], taken)]
        starts = offsets(taken)
        requests = requests.taken(order)
    if len(order):
        since = np.round(requests.time_s - requests.time_s[0], MICROS)
        requests = requests._replace(time_s=since)
    return Trace(name, block_tokens, *requests, starts, chained(starts, dense(ids)))


def offsets(counts: Longs) -> Longs:
    """[n + 1] where each of `n` runs of `counts` items starts when they lie end to end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def spread(firsts: Longs, counts: Longs) -> Longs:
    """Every run of `counts[i]` numbers from `firsts[i]` on, end to end."""
    starts = offsets(counts)
    run = np.repeat(firsts - starts[:-1], counts)
    run += np.arange(len(run))
    return run


def dense(ids: Longs | Ints) -> Ints:
    """Number ids 0, 1, ... in order of first appearance."""
    total = len(ids)
    if total == 0:
        return np.empty(0, np.int32)
    low, high = int(ids.min()), int(ids.max())
    if high - low >= 4 * total + 1_000_000:  # a table of all ids would be larger than sorting them
        ids = np.unique(ids, return_inverse=True)[1]
        low, high = 0, int(ids.max())
    elif low:
        ids = ids - low
    first = np.full(high - low + 1, total, np.int64)
    first[ids[::-1]] = np.arange(total - 1, -1, -1)  # the first appearance is written last
    present = np.flatnonzero(first < total)
    number = np.empty(len(first), np.int32)
    number[present[np.argsort(first[present])]] = np.arange(len(present), dtype=np.int32)
    return number[ids]


def chained(starts: Longs, ids: Ints) -> Ints:
    """Dense ids that name whole prefixes: the same, if each has the same id in front everywhere.

    Otherwise ids name blocks by their own content, and a pair of prefix and content gets an id.
    """
    before = _in_front(starts, ids)
    parents = np.empty(int(ids.max(initial=-1)) + 1, np.int32)
    parents[ids] = before
    if (parents[ids] == before).all():
        return ids
    names: dict[int, int] = {}
    prefix = UNKNOWN
    prefixes = []
    for first, block in zip((before == UNKNOWN).tolist(), ids.tolist(), strict=True):
        behind = 0 if first else prefix + 1
        prefix = names.setdefault(behind << 32 | block, len(names))
        prefixes.append(prefix)
    return np.array(prefixes, np.int32)


def _in_front(starts: Longs, ids: Ints) -> Ints:
    """For each access, the id in front of it in its chain; -1 at a head."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[starts[:-1][np.diff(starts) > 0]] = UNKNOWN
    return before
