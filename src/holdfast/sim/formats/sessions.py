"""Agent sessions, one JSON object per line, with times relative to the session's start.

The format of WEKA's captures of Claude Code (callanjfox/kv-cache-tester): `block_size`, and
`requests` with `t`, `in`, `out` and either `hash_ids` or `runs` of `[first id, number of ids]`. Ids
are hashes of whole prefixes and unique within a session, or globally if `hash_id_scope` is
"global". Times of a sub-agent are relative to its own start: its requests are nested in an entry of
`requests`, or refer to an entry of `subagents` by `sub`.

Sessions were recorded one at a time, so the loader composes a trace: each session starts at random
within a window. Blocks shared between sessions are unknown, so hits are a lower bound. A session
that is the start of another (`prefix_of`) is skipped.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from holdfast.sim.formats.rows import Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Longs, Trace, arrange, offsets, spread

_START_SEED = 1
"""Seed of the random starts, so that a file always gives the same trace."""


class SubAgent(msgspec.Struct):
    """A sub-agent: when it started, in seconds from the session's start."""

    t: Time


Id = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class AgentRequest(msgspec.Struct):
    """A request, or a sub-agent with `requests`; `think` is the time since the last answer."""

    t: Time
    tokens: Tokens = msgspec.field(name="in", default=0)
    answer: Tokens = msgspec.field(name="out", default=0)
    think: Time | None = None
    think_time: Time | None = None
    sub: Annotated[int, msgspec.Meta(ge=0)] | None = None
    runs: list[tuple[Id, Tokens]] | None = None
    hash_ids: list[Id] | None = None
    requests: list[AgentRequest] | None = None


class AgentSession(msgspec.Struct):
    """One session."""

    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[AgentRequest]
    subagents: list[SubAgent] = []
    prefix_of: str | None = None
    hash_id_scope: str = "local"


class SessionChains:
    """Chains as runs of consecutive ids, offset so that sessions do not share ids."""

    def __init__(self) -> None:
        self.firsts = array("q")
        self.lengths = array("q")
        self.runs = array("q")
        self._base = self._end = 0

    def session(self, scope: str) -> None:
        """Start a session; its ids get an offset unless their scope is global."""
        self._base = 0 if scope == "global" else self._end

    def add(self, request: AgentRequest) -> int:
        """Add the chain of one request; return its number of blocks."""
        runs = request.runs
        if runs is None:
            ids = np.array(request.hash_ids or [], np.int64)
            heads = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1) if len(ids) else ids
            lengths = np.diff(heads, append=len(ids))
            runs = list(zip(ids[heads].tolist(), lengths.tolist(), strict=True))
        self.runs.append(len(runs))
        for first, length in runs:
            self.firsts.append(self._base + first)
            self.lengths.append(length)
            self._end = max(self._end, self._base + first + length)
        return sum(length for _, length in runs)

    def ids(self, order: Longs) -> tuple[Longs, Longs]:
        """Return the number of blocks of each request, and all ids, for requests in `order`."""
        runs = np.array(self.runs, np.int64)
        taken = spread(offsets(runs)[:-1][order], runs[order])
        lengths = np.array(self.lengths, np.int64)[taken]
        bounds = offsets(runs[order])
        counts = np.diff(offsets(lengths)[bounds])
        return counts, spread(np.array(self.firsts, np.int64)[taken], lengths)


def read(source: Source, reading: Reading) -> Trace:
    """Compose a trace of the sessions with random starts, drawn in the order of the file."""
    rng = random.Random(_START_SEED)  # noqa: S311 - not a secret
    rows, chains = Rows(source), SessionChains()
    block_tokens = 0
    for number, session in source.decoded(msgspec.json.Decoder(AgentSession)):
        if session.prefix_of is not None:
            continue
        if block_tokens and session.block_size != block_tokens:
            raise source.error(
                number,
                f"block_size {session.block_size} after {block_tokens}: a trace has one block "
                "size; split the file by block size",
            )
        block_tokens = session.block_size
        if reading.block_tokens not in (None, block_tokens):
            raise source.error(
                number,
                f"block_size {block_tokens}, but {reading.block_tokens} was given: ids cannot be "
                "converted to another block size; remove the option",
            )
        start_s = reading.window_s * rng.random()
        chains.session(session.hash_id_scope)
        session_number = rows.session_of(number)
        for at, (request, since_s) in enumerate(_flat(rows, number, session)):
            blocks = chains.add(request)
            full = request.tokens // block_tokens
            if blocks not in (full, -(-request.tokens // block_tokens)):
                raise source.error(
                    number,
                    f"request {at} at {request.t:g} s: {blocks} ids for {request.tokens} tokens, "
                    f"but {full} full blocks of {block_tokens}: ids are missing or too many; "
                    "correct or remove the request",
                )
            think = request.think_time if request.think is None else request.think
            think_s = math.nan if think is None or not at else think
            tokens = request.tokens, request.answer
            rows.add(number, start_s + since_s, tokens, session_number, think_s)
            rows.counts.append(blocks)
    times = np.array(rows.time_s)
    order = np.argsort(times, kind="stable")
    rows.time_s = array("d", np.sort(times))  # composed: no order to warn about
    requests = rows.requests().taken(order)._replace(time_s=times[order])
    rows.check_block_counts(np.array(rows.counts, np.int64))
    counts, ids = chains.ids(order)
    trace = arrange(source.name, block_tokens, requests, counts, ids)
    return trace._replace(composed=True)


def _flat(rows: Rows, number: int, session: AgentSession) -> Iterator[tuple[AgentRequest, float]]:
    """Yield (request, seconds since the session's start), with sub-agents' requests in place."""
    pending = [(request, 0.0) for request in reversed(session.requests)]
    while pending:
        request, since_s = pending.pop()  # `since_s`: when the agent that sent it started
        if request.requests is not None:
            since_s += request.t
            pending += [(inner, since_s) for inner in reversed(request.requests)]
            continue
        if request.sub is not None:
            if request.sub >= len(session.subagents):
                raise rows.source.error(
                    number,
                    f"request at {request.t:g} s: sub {request.sub}, but there are "
                    f"{len(session.subagents)} subagents; correct or remove the request",
                )
            since_s = session.subagents[request.sub].t
        yield request, since_s + request.t
