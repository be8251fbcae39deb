"""A load to size for: its requests, and the tokens of each that hit at any capacity.

The hits are those of an LRU store. One number for each reused piece of a request gives its hits at
every capacity: the LRU stack distance, the number of other tokens used since its last use (Mattson
et al., 1970). A trace gives exact distances. For identical users with random return times the
distance is uniformly distributed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from holdfast.errors import ConfigError
from holdfast.sim.evidence import check_rate, check_reuse, check_times, paced, trace_notes
from holdfast.sim.formats.rows import TOKENS_MAX
from holdfast.sim.model.shape import ModelShape
from holdfast.sim.reuse import Reuse
from holdfast.sim.trace import Floats, Longs, Trace

SAMPLE_REQUESTS = 2000
"""Number of requests in the sample that a search works with."""

_MINUTE_S = 60.0
_USERS_MAX = 100_000_000
_EVERY_S_MIN, _EVERY_S_MAX = 1e-3, 1e9


class Cut(Enum):
    """Where a held context can be cut, to serve a request that shares only a prefix with it."""

    BLOCK = "block"
    """At every block: all layers attend to the full context."""
    END = "end"
    """Where an earlier request ended: recurrent states and windows are saved only there."""

    @classmethod
    def of(cls, shape: ModelShape) -> Cut:
        """Return the cut that the model's layers allow."""
        return cls.END if shape.recurrent or shape.windowed else cls.BLOCK


class Demand(NamedTuple):
    """A load: `n` requests, and the `m` pieces of their prompts that were used before."""

    about: str
    """Description for the report."""
    requests_per_s: float
    """Mean rate."""
    peak: float
    """Rate of the busiest minute divided by the mean rate."""
    input_tokens: Floats
    """[n] prompt tokens."""
    request: Longs
    """[m] number of the request that the piece belongs to."""
    distance: Floats
    """[m] stack distance: other tokens used since the last use of the piece."""
    tokens: Floats
    """[m] tokens of the piece. With `Cut.END`, a piece is held whole or not at all."""
    unique_tokens: float
    """Distinct tokens of all requests: a store of this capacity never evicts."""
    contexts: float
    """Number of contexts, each with its own windows."""
    checkpoints: float
    """Number of request ends, each with its own recurrent state."""
    cut: Cut = Cut.BLOCK
    block_tokens: int | None = None
    """Block size of the trace; None for users."""
    other_block_tokens: tuple[int, ...] = ()
    """Other block sizes that fit the trace as well."""
    notes: tuple[str, ...] = ()
    """What the trace leaves open and what was assumed instead."""

    @property
    def peak_requests_per_s(self) -> float:
        """Rate of the busiest minute."""
        return self.requests_per_s * self.peak

    def held(self, capacity_tokens: float) -> Floats:
        """Return the leading tokens of each request that an LRU store of this capacity holds.

        The last token of a prompt is always computed, so it never counts as held.
        """
        capacity_left = capacity_tokens - self.distance
        if self.cut is Cut.END:
            pieces = np.where(capacity_left >= self.tokens, self.tokens, 0.0)
        else:
            pieces = np.clip(capacity_left, 0.0, self.tokens)
        held = np.bincount(self.request, weights=pieces, minlength=len(self.input_tokens))
        limited: Floats = np.minimum(held, np.maximum(self.input_tokens - 1, 0))
        return limited

    def sampled(self) -> Demand:
        """Return `SAMPLE_REQUESTS` requests evenly over all lengths, with their hits unchanged."""
        n = len(self.input_tokens)
        if n <= SAMPLE_REQUESTS:
            return self
        by_length = np.argsort(self.input_tokens, kind="stable")
        at = (np.arange(SAMPLE_REQUESTS) + 0.5) * n / SAMPLE_REQUESTS
        chosen = by_length[at.astype(np.int64)]
        place = np.full(n, -1, np.int64)
        place[chosen] = np.arange(SAMPLE_REQUESTS)
        kept = place[self.request] >= 0
        return self._replace(
            input_tokens=self.input_tokens[chosen],
            request=place[self.request[kept]],
            distance=self.distance[kept],
            tokens=self.tokens[kept],
        )


def of_users(users: int, context: int, new: int, every_s: float, cut: Cut = Cut.BLOCK) -> Demand:
    """Return the load of `users` identical users with one context each.

    Each prompt has `context` tokens, the last `new` of them new. A user sends a request every
    `every_s` seconds on average, at random times: between two requests of one user, every number
    of other users is equally likely. Raises ConfigError for a value out of range.
    """
    _check(0 < users <= _USERS_MAX, "--users", users, f"1 to {_USERS_MAX:,}")
    _check(1 <= context <= TOKENS_MAX, "--context", context, f"1 to {TOKENS_MAX:,} tokens")
    _check(0 < new <= context, "--new", new, f"1 to the context of {context:,} tokens")
    every = f"{_EVERY_S_MIN:g} to {_EVERY_S_MAX:g} seconds"
    _check(_EVERY_S_MIN <= every_s <= _EVERY_S_MAX, "--every", every_s, every)
    n = min(users, SAMPLE_REQUESTS)
    others = np.arange(n, dtype=np.float64) * (users / n)
    return Demand(
        about=f"{users:,} users with {context:,} tokens of context each; {new:,} are new at each "
        f"request, one request per user every {every_s:g} s",
        requests_per_s=users / every_s,
        peak=1.0,
        input_tokens=np.full(n, float(context)),
        request=np.arange(n, dtype=np.int64),
        distance=others * context,
        tokens=np.full(n, float(context - new)),
        unique_tokens=float(users) * context,
        contexts=float(users),
        checkpoints=float(users),
        cut=cut,
    )


def of_trace(trace: Trace, requests_per_s: float | None = None, cut: Cut = Cut.BLOCK) -> Demand:
    """Return the load of a trace, with exact hits, at its own rate or at `requests_per_s`.

    A trace without times is taken as evenly spaced at `requests_per_s`. Raises ConfigError if the
    trace does not tell reuse or times, or for a rate out of range.
    """
    if requests_per_s is not None:
        check_rate(requests_per_s)
    runs = check_reuse(trace)
    untimed, times = bool(trace.untimed), f" in {trace.span_s:,.0f} s"
    if untimed:
        trace = trace if requests_per_s is None else paced(trace, requests_per_s)
        check_times(trace)
        times = ", without times"
    request, distance, blocks, ends = runs.request, runs.distance, runs.blocks, 0
    if cut is Cut.END:
        request, distance, blocks, ends = _at_ends(trace, runs)
    span_s = max(trace.span_s, 1.0)
    _, minutes = np.unique(trace.time_s // _MINUTE_S, return_counts=True)
    rate = trace.requests / span_s
    peak = max(1.0, float(minutes.max()) / min(_MINUTE_S, span_s) / rate)
    return Demand(
        about=f"trace {trace.name}: {trace.requests:,} requests{times}, "
        f"{trace.input_tokens.mean():,.0f} tokens on average"
        + ("" if requests_per_s is None else f"; sized for {requests_per_s:,.12g} per second")
        + ("" if trace.content else "; reuse is known within sessions only, hits may be higher"),
        requests_per_s=requests_per_s or rate,
        peak=1.0 if untimed else peak,
        input_tokens=trace.input_tokens.astype(np.float64),
        request=request,
        distance=(distance * trace.block_tokens).astype(np.float64),
        tokens=(blocks * trace.block_tokens).astype(np.float64),
        unique_tokens=float(trace.unique) * trace.block_tokens,
        contexts=float(trace.unique * trace.block_tokens / max(trace.input_tokens.mean(), 1.0)),
        checkpoints=float(ends),
        cut=cut,
        block_tokens=trace.block_tokens,
        other_block_tokens=trace.other_block_tokens,
        notes=tuple(trace_notes(trace._replace(content=True))),  # `about` says whether it is
    )


def _at_ends(trace: Trace, runs: Reuse) -> tuple[Longs, Longs, Longs, int]:
    """Cut reused blocks into pieces that end where an earlier request ended, at a full block.

    Returns request, distance and length of each piece, in blocks, and the number of distinct ends.
    A store holds a piece if its capacity exceeds the stack distance of the piece's last block.
    Distances grow along a chain, so the pieces before a held piece are held too.
    """
    full = np.minimum(trace.input_tokens // trace.block_tokens, np.diff(trace.starts)).tolist()
    ended = np.zeros(trace.unique, np.bool_)
    found: list[Longs] = []
    for request, blocks in enumerate(full):
        chain = trace.chain(request)
        found.append(np.flatnonzero(ended[chain]))
        if blocks:
            ended[chain[blocks - 1]] = True
    request_of = np.repeat(np.arange(trace.requests), [len(one) for one in found])
    last = np.concatenate(found)  # position in the chain of the last block of each piece
    in_front = np.where(np.diff(request_of, prepend=-1) != 0, -1, np.roll(last, 1))
    stride = int(np.diff(trace.starts).max()) + 1
    heads = runs.request * stride + runs.depth
    run = np.searchsorted(heads, request_of * stride + last, side="right") - 1
    needed = runs.distance[run] + last - runs.depth[run] + 1  # capacity in blocks
    length = last - in_front
    return request_of, needed - length, length, int(ended.sum())


def _check(valid: bool, name: str, value: float, limit: str) -> None:  # noqa: FBT001  # a verdict
    if not valid:
        shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        raise ConfigError(f"{name}: {shown}: give {limit}")
