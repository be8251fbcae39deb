"""A trace: the requests of a recorded workload as columns, with the ids of their blocks.

Every loader in `sim/formats` returns a `Trace`; replay, curves and simulation read only traces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
TIME_DECIMALS = 6
"""Decimals that times in seconds are rounded to, so that equal intervals compare equal."""

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class Trace(NamedTuple):
    """`n` requests in order of arrival, and the ids of the blocks of their inputs, end to end.

    A block is `block_tokens` tokens of a request's input. An id names a whole prefix, as a key
    does: equal ids mean equal blocks after equal blocks. Ids are dense, 0 to `unique - 1` in order
    of first appearance, so they can index arrays. If a trace lists partial blocks, the last block
    of a request may be partial; otherwise up to `block_tokens - 1` tokens at the end have no block.
    In both cases the first `k` blocks hold `min(k * block_tokens, input_tokens)` tokens.

    `session` numbers conversations and agent runs, sub-agents included. The arrays are shared, not
    copied: treat them as read-only.
    """

    name: str
    block_tokens: int
    time_s: Floats
    """[n] arrival in seconds, ascending, in whole microseconds; the first is 0."""
    input_tokens: Longs
    """[n] tokens of the prompt."""
    output_tokens: Longs
    """[n] tokens of the answer; 0 if unknown."""
    session: Ints
    """[n] number of the session, from 0; -1 if unknown."""
    think_s: Floats
    """[n] seconds from the end of the session's previous answer to this request; nan if unknown."""
    starts: Longs
    """[n + 1] start of each request's ids in `ids`; the last entry is the number of ids."""
    ids: Ints
    """[starts[n]] the blocks of request `i`, head first, are `ids[starts[i] : starts[i + 1]]`."""
    content: bool = True
    """Whether ids identify content; False: ids are made up, with reuse within sessions only."""
    composed: bool = False
    """Whether the sessions were recorded one at a time and start at random within a window."""
    untimed: str = ""
    """Why `time_s` gives an order only, as "it has no times"; empty if it has arrival times."""
    other_block_tokens: tuple[int, ...] = ()
    """Other block sizes that fit the file as well as `block_tokens`, which is then a guess."""
    remarks: tuple[str, ...] = ()
    """What the loader found or assumed that changes results, as sentences without a full stop."""

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.time_s)

    @property
    def unique(self) -> int:
        """Number of distinct blocks; one pass over `ids`."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @property
    def blocks(self) -> int:
        """Number of block accesses: the blocks of all requests, repeats included."""
        return len(self.ids)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.time_s[-1]) if len(self.time_s) else 0.0

    def chain(self, request: int) -> Ints:
        """Return the ids of one request, head first, as a view."""
        return self.ids[self.starts[request] : self.starts[request + 1]]

    def select(self, kept: Bools) -> Trace:
        """Return the trace of the requests for which `kept` is true; times start at 0 again."""
        at = np.flatnonzero(kept)
        counts = np.diff(self.starts)[at]
        columns = Requests(
            self.time_s, self.input_tokens, self.output_tokens, self.session, self.think_s
        )
        ids = self.ids[spread(self.starts[:-1][at], counts)]
        trace = arrange(self.name, self.block_tokens, columns.taken(at), counts, ids)
        return self._replace(**{name: getattr(trace, name) for name in _COLUMNS})

    def first(self, requests: int) -> Trace:
        """Return the trace of the first `requests` requests; the arrays are views."""
        columns = {name: getattr(self, name)[:requests] for name in _COLUMNS[:-2]}
        starts = self.starts[: requests + 1]
        return self._replace(**columns, starts=starts, ids=self.ids[: starts[-1]])

    def coarse(self, blocks: int) -> Trace:
        """Return the trace in blocks that are `blocks` times as long.

        What does not fill such a block is left out, and so are requests without a whole one.
        """
        chains = [self.chain(request)[blocks - 1 :: blocks] for request in range(self.requests)]
        kept = np.flatnonzero([len(chain) for chain in chains])
        counts = np.array([len(chains[request]) for request in kept], np.int64)
        size = self.block_tokens * blocks
        requests = Requests(
            self.time_s[kept],
            counts * size,
            self.output_tokens[kept],
            self.session[kept],
            self.think_s[kept],
        )
        ids = np.concatenate([self.ids[:0], *(chains[request] for request in kept)])
        trace = arrange(self.name, size, requests, counts, ids)
        return self._replace(block_tokens=size, **{name: getattr(trace, name) for name in _COLUMNS})

    def parents(self) -> Ints:
        """Return, for each id, the id before it; -1 for the head of a chain."""
        parents = np.empty(self.unique, np.int32)
        parents[self.ids] = previous_ids(self.starts, self.ids)
        return parents

    def sum_by_request(self, request: Longs, values: Longs) -> Longs:
        """Return [n] the sums of `values`, each of which belongs to an entry of `request`."""
        return np.bincount(request, weights=values, minlength=self.requests).astype(np.int64)


_COLUMNS = (*Trace._fields[2:7], "starts", "ids")


class Requests(NamedTuple):
    """The columns of a trace without ids, in the order of its file; see `Trace` for units."""

    time_s: Floats
    input_tokens: Longs
    output_tokens: Longs
    session: Ints
    think_s: Floats

    def taken(self, order: Longs) -> Requests:
        """Return the requests that `order` selects, in this order."""
        return Requests._make(column[order] for column in self)


def arrange(
    name: str, block_tokens: int, requests: Requests, counts: Longs, ids: Longs | Ints
) -> Trace:
    """Return the trace of requests in any order with any integers as ids.

    `counts[i]` ids of `ids` belong to request `i`. Requests are sorted by time, in a stable order;
    times are shifted to start at 0, and ids become dense. If an id appears after different ids, ids
    name the content of single blocks, and all ids are replaced by ids of whole prefixes.
    """
    starts = offsets(counts)
    order = np.argsort(requests.time_s, kind="stable")
    if (np.diff(order) != 1).any():
        taken = counts[order]
        ids = ids[spread(starts[:-1][order], taken)]
        starts = offsets(taken)
        requests = requests.taken(order)
    if len(order):
        since = np.round(requests.time_s - requests.time_s[0], TIME_DECIMALS)
        requests = requests._replace(time_s=since)
    return Trace(name, block_tokens, *requests, starts, chained(starts, dense(ids)))


def share(part: float, whole: float) -> float:
    """Return `part / whole`; 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def offsets(counts: Longs) -> Longs:
    """Return [n + 1] the start of each of `n` consecutive runs of `counts` items."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def spread(firsts: Longs, counts: Longs) -> Longs:
    """Return the numbers `firsts[i]`, `firsts[i] + 1`, ..., `counts[i]` of them, for each `i`."""
    starts = offsets(counts)
    run = np.repeat(firsts - starts[:-1], counts)
    run += np.arange(len(run))
    return run


def dense(ids: Longs | Ints) -> Ints:
    """Renumber ids from 0 in order of first appearance."""
    total = len(ids)
    if total == 0:
        return np.empty(0, np.int32)
    low, high = int(ids.min()), int(ids.max())
    if high - low >= 4 * total + 1_000_000:  # a table of all ids needs more memory than sorting
        ids = np.unique(ids, return_inverse=True)[1]
        low, high = 0, int(ids.max())
    elif low:
        ids = ids - low
    first = np.full(high - low + 1, total, np.int64)
    # The first appearance is written last and stays.
    first[ids[::-1]] = np.arange(total - 1, -1, -1)
    present = np.flatnonzero(first < total)
    number = np.empty(len(first), np.int32)
    number[present[np.argsort(first[present])]] = np.arange(len(present), dtype=np.int32)
    return number[ids]


def chained(starts: Longs, ids: Ints) -> Ints:
    """Return ids that name whole prefixes.

    These are the given ids if each always follows the same id. Otherwise the given ids name the
    content of single blocks, and each pair of prefix and content gets an id.
    """
    before = previous_ids(starts, ids)
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


def previous_ids(starts: Longs, ids: Ints) -> Ints:
    """Return, for each access, the id before it in its chain; -1 at a head."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[starts[:-1][np.diff(starts) > 0]] = UNKNOWN
    return before
