"""What is asked of context memory: requests, and how much of each a store of any size holds.

A store that evicts the least recently used context holds what was used within the last so many
tokens. So one number for each piece of a request is enough to know its hits at every capacity: how
many other tokens were used since (Mattson et al., 1970). A trace gives that number exactly; users
who are all alike and come back at random give a uniform one.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from holdfast.sim.formats.rows import TOKENS_MAX
from holdfast.sim.model import ModelShape
from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import Longs, Trace

Floats = NDArray[np.float64]

ROWS_MAX = 2000
"""Requests that stand for all of them while a size is searched."""

_MINUTE_S = 60.0
_USERS_MAX = 100_000_000
_EVERY_S_MIN, _EVERY_S_MAX = 1e-3, 1e9
_RATE_MIN, _RATE_MAX = 1e-9, 1e9


class Cut(Enum):
    """How far a held context serves a request that only starts like it."""

    BLOCK = "block"
    """As far as they are the same: every layer sees the whole of it."""
    END = "end"
    """As far as an earlier request ended: only there, a state or windows were kept."""

    @classmethod
    def of(cls, shape: ModelShape) -> Cut:
        """Return where contexts of this model can be cut."""
        return cls.END if shape.recurrent or shape.windows else cls.BLOCK


class Demand(NamedTuple):
    """`n` requests that stand for a load, and `m` pieces of them that were used before."""

    about: str
    requests_per_s: float
    """On the average."""
    peak: float
    """Requests of the busiest minute over the average."""
    input_tokens: Longs
    """[n] the prompt of each request."""
    request: Longs
    """[m] whose piece it is."""
    newer: Floats
    """[m] tokens that were used since the piece was."""
    tokens: Floats
    """[m] how long the piece is; where contexts are cut at ends, it is held whole or not at all."""
    unique_tokens: float
    """All different tokens: a store of this size never evicts."""
    contexts: float
    """Contexts that exist at the end, each with windows of its own."""
    checkpoints: float
    """Ends of requests, each with a recurrent state of its own."""
    cut: Cut = Cut.BLOCK

    def held(self, capacity_tokens: float) -> Floats:
        """Return how many leading tokens of each request such a store holds; never all of them."""
        room = capacity_tokens - self.newer
        if self.cut is Cut.END:
            pieces = np.where(room >= self.tokens, self.tokens, 0.0)
        else:
            pieces = np.clip(room, 0.0, self.tokens)
        held = np.bincount(self.request, weights=pieces, minlength=len(self.input_tokens))
        most: Floats = np.minimum(held, np.maximum(self.input_tokens - 1, 0))
        return most

    def thinned(self, rows_max: int = ROWS_MAX) -> Demand:
        """Return some requests of all lengths, with the hits they have in the whole load."""
        n = len(self.input_tokens)
        if n <= rows_max:
            return self
        by_length = np.argsort(self.input_tokens, kind="stable")
        chosen = by_length[((np.arange(rows_max) + 0.5) * n / rows_max).astype(np.int64)]
        place = np.full(n, -1, np.int64)
        place[chosen] = np.arange(rows_max)
        kept = place[self.request] >= 0
        return self._replace(
            input_tokens=self.input_tokens[chosen],
            request=place[self.request[kept]],
            newer=self.newer[kept],
            tokens=self.tokens[kept],
        )


def of_users(users: int, context: int, new: int, every_s: float, cut: Cut = Cut.BLOCK) -> Demand:
    """Return the load of users who each keep one context and come back with `new` tokens.

    All have `context` tokens of which the last `new` are new each time, and come back every
    `every_s` seconds on the average, at random: so between two requests of one user, every number
    of other users is equally likely. Raises ConfigError for numbers that make no sense.
    """
    _check(0 < users <= _USERS_MAX, "--users", users, f"1 to {_USERS_MAX:,}")
    _check(1 <= context <= TOKENS_MAX, "--context", context, f"1 to {TOKENS_MAX:,} tokens")
    _check(0 < new <= context, "--new", new, f"1 to the context of {context:,} tokens")
    every = f"{_EVERY_S_MIN:g} to {_EVERY_S_MAX:g} seconds"
    _check(_EVERY_S_MIN <= every_s <= _EVERY_S_MAX, "--every", every_s, every)
    n = min(users, ROWS_MAX)
    others = np.arange(n, dtype=np.float64) * (users / n)
    return Demand(
        about=f"{users:,} users with {context:,} tokens of context each; {new:,} are new at each "
        f"request, one every {every_s:g} s a user",
        requests_per_s=users / every_s,
        peak=1.0,
        input_tokens=np.full(n, context, np.int64),
        request=np.arange(n, dtype=np.int64),
        newer=others * context,
        tokens=np.full(n, float(context - new)),
        unique_tokens=float(users) * context,
        contexts=float(users),
        checkpoints=float(users),
        cut=cut,
    )


def of_trace(trace: Trace, requests_per_s: float | None = None, cut: Cut = Cut.BLOCK) -> Demand:
    """Return the load of a trace, with exact hits, at its own rate or at another.

    Raises ConfigError where nothing is known of reuse, or for a rate that makes no sense.
    """
    if requests_per_s is not None:
        rates = f"{_RATE_MIN:g} to {_RATE_MAX:g} requests a second"
        _check(_RATE_MIN <= requests_per_s <= _RATE_MAX, "--rate", requests_per_s, rates)
    if not trace.requests or not trace.blocks:
        raise ConfigError(
            f"trace {trace.name}: no block ids, so nothing is known of reuse; use another trace, "
            "or --users and --context"
        )
    runs = reuse(trace)
    if not trace.content and not len(runs.request):
        raise ConfigError(
            f"trace {trace.name}: says when requests came and how long they were, but not what was "
            "in them, so nothing is known of reuse; use a trace with block ids or texts, or "
            "--users and --context"
        )
    pieces = _at_ends(trace, runs) if cut is Cut.END else _by_block(trace, runs)
    span_s = max(float(trace.time_s[-1] - trace.time_s[0]), 1.0)
    _, minutes = np.unique(trace.time_s // _MINUTE_S, return_counts=True)
    rate = trace.requests / span_s
    return Demand(
        about=f"trace {trace.name}: {trace.requests:,} requests in {span_s:,.0f} s, "
        f"{trace.input_tokens.mean():,.0f} tokens on the average"
        + ("" if requests_per_s is None else f"; sized for {requests_per_s:,.12g} a second")
        + ("" if trace.content else "; reuse is known within sessions only, more may be hit"),
        requests_per_s=requests_per_s or rate,
        peak=max(1.0, float(minutes.max()) / min(_MINUTE_S, span_s) / rate),
        input_tokens=trace.input_tokens,
        request=pieces.request,
        newer=pieces.newer,
        tokens=pieces.tokens,
        unique_tokens=float(trace.unique) * trace.block_tokens,
        contexts=float(trace.unique * trace.block_tokens / max(trace.input_tokens.mean(), 1.0)),
        checkpoints=pieces.ends,
        cut=cut,
    )


class _Pieces(NamedTuple):
    """What was used before, in tokens; see `Demand`."""

    request: Longs
    newer: Floats
    tokens: Floats
    ends: float
    """Different places where requests ended; 0 where it does not matter."""


def _by_block(trace: Trace, runs: Reuse) -> _Pieces:
    newer, tokens = runs.newer * trace.block_tokens, runs.blocks * trace.block_tokens
    return _Pieces(runs.request, newer.astype(np.float64), tokens.astype(np.float64), 0.0)


def _at_ends(trace: Trace, runs: Reuse) -> _Pieces:
    """Cut what was used before where earlier requests ended: behind their last full block.

    What such a piece needs to be held is the place of its last block in the order of recency, and
    along a chain those places only grow: so a piece is held if all in front of it are.
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
    last = np.concatenate(found)  # blocks in front of the last one of each piece
    in_front = np.where(np.diff(request_of, prepend=-1) != 0, -1, np.roll(last, 1))
    stride = int(np.diff(trace.starts).max()) + 1
    heads = runs.request * stride + runs.depth
    run = np.searchsorted(heads, request_of * stride + last, side="right") - 1
    place = runs.newer[run] + last - runs.depth[run] + 1
    length = last - in_front
    size = float(trace.block_tokens)
    return _Pieces(request_of, (place - length) * size, length * size, float(ended.sum()))


def _check(fine: bool, name: str, value: float, limit: str) -> None:  # noqa: FBT001  # a verdict
    if not fine:
        raise ConfigError(f"{name}: {_said(value)}: give {limit}")


def _said(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
