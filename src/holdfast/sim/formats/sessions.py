"""Agent sessions, one JSON object per line, with times from the session's start.

The format of WEKA's captures of Claude Code (callanjfox/kv-cache-tester): `block_size`, and
`requests` with `t`, `in`, `out` and either `hash_ids` or `runs` of `[first id, number of ids]`. Ids
are hashes of whole prefixes and unique within a session, or globally if `hash_id_scope` is
"global". The requests of a sub-agent are nested in an entry of `requests`, or refer to an entry of
`subagents` by `sub`. Their times are relative to the sub-agent's start in older captures, and
relative to the session's start ("absolute") in those of AgentX.

Sessions were recorded one at a time, so the loader composes a trace: each session starts at random
within a window. Blocks shared between sessions are unknown, so hits are a lower bound. A session
that is the start of another (`prefix_of`) is skipped.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from holdfast.errors import TraceError
from holdfast.sim.formats.arrivals import Arrivals
from holdfast.sim.formats.rows import ID_MAX, Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Longs, Trace, arrange, offsets, spread

_START_SEED = 1
"""Seed of the random starts, so that a file always gives the same trace."""

_NUMBERS = 1 << 32
"""Ids below this are numbers, of which runs are kept; ids from here on are hashes."""

_ALL_SESSIONS = "all sessions"
"""The scope of global ids, which differs from the number of any session."""

_EARLY_S = 1.0
"""Seconds that a sub-agent's first request may seem to lie before its start, in absolute times."""


class SubAgent(msgspec.Struct):
    """A sub-agent: when it started, in seconds from the session's start."""

    t: Time


class AgentRequest(msgspec.Struct):
    """A request, or a sub-agent with `requests`; `think` is the time since the last answer."""

    t: Time
    tokens: Tokens = msgspec.field(name="in", default=0)
    answer: Tokens = msgspec.field(name="out", default=0)
    think: Time | None = None
    think_time: Time | None = None
    sub: Annotated[int, msgspec.Meta(ge=0)] | None = None
    runs: list[tuple[int, Tokens]] | None = None
    hash_ids: list[int] | None = None
    model: str | None = None
    requests: list[AgentRequest] | None = None


class AgentSession(msgspec.Struct):
    """One session."""

    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: list[AgentRequest]
    subagents: list[SubAgent] = []
    prefix_of: str | None = None
    hash_id_scope: Literal["local", "global"] | None = None


class SessionChains:
    """Chains as runs of consecutive ids; each scope of ids gets numbers of its own."""

    def __init__(self) -> None:
        self.firsts = array("q")
        self.lengths = array("q")
        self.runs = array("q")
        self.heads = array("q")
        """[requests] A number for the first block of each request; -1 without blocks."""
        self._scope = array("i")
        self._scopes: dict[Hashable, int] = {}
        self._hashes: dict[tuple[int, int], int] = {}

    def add(self, request: AgentRequest, scope: Hashable) -> int:
        """Add the chain of one request; return its number of blocks. Raises ValueError for an id.

        Equal ids are equal blocks if their scopes are equal.
        """
        of = self._scopes.setdefault(scope, len(self._scopes))
        before = len(self.firsts)
        for first, length in self._runs(request, of):
            self.firsts.append(first)
            self.lengths.append(length)
            self._scope.append(of if first < _NUMBERS else -1)
        self.runs.append(len(self.firsts) - before)
        self.heads.append(self.firsts[before] if len(self.firsts) > before else -1)
        return sum(self.lengths[before:])

    def _runs(self, request: AgentRequest, scope: int) -> Iterator[tuple[int, int]]:
        """Yield runs of numbers; a hash becomes a number from `_NUMBERS` on, a run of its own."""
        runs: Sequence[tuple[int, int]] | None = request.runs
        if runs is None:
            runs = _runs_of(request.hash_ids or [])
        for first, length in runs:
            if not 0 <= first <= ID_MAX + 1 - length:
                raise ValueError(f"id {first} with {length} ids from there: give 0 to 2^64 - 1")
            numbers = max(0, min(length, _NUMBERS - first))
            if numbers:
                yield first, numbers
            for block in range(first + numbers, first + length):
                number = len(self._hashes) + _NUMBERS
                yield self._hashes.setdefault((scope, block), number), 1

    def ids(self, order: Longs) -> tuple[Longs, Longs]:
        """Return the number of blocks of each request, and all ids, for requests in `order`."""
        runs = np.array(self.runs, np.int64)
        firsts, lengths = np.array(self.firsts, np.int64), np.array(self.lengths, np.int64)
        scope = np.array(self._scope, np.int64)
        # The numbers of the scopes one after the other, and hashes (scope -1) after all of them.
        ends = np.zeros(len(self._scopes) + 1, np.int64)
        np.maximum.at(ends, scope, firsts + lengths)
        ends[-1] = 0
        firsts += np.where(scope < 0, int(ends.sum()) - _NUMBERS, offsets(ends[:-1])[scope])
        taken = spread(offsets(runs)[:-1][order], runs[order])
        lengths = lengths[taken]
        counts = np.diff(offsets(lengths)[offsets(runs[order])])
        return counts, spread(firsts[taken], lengths)


def _runs_of(ids: list[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive ids."""
    if not ids:
        return []
    if max(ids) >= _NUMBERS:
        return [(block, 1) for block in ids]
    numbers = np.array(ids, np.int64)
    heads = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    lengths = np.diff(heads, append=len(numbers))
    return list(zip(numbers[heads].tolist(), lengths.tolist(), strict=True))


def read(source: Source, reading: Reading) -> Trace:
    """Compose a trace of the sessions with random starts, drawn in the order of the file."""
    rng = random.Random(_START_SEED)  # noqa: S311 - not a secret
    rows, chains = Rows(source, reading), SessionChains()
    block_tokens = models_changed = absolute_sessions = 0
    for number, session in source.decoded(msgspec.json.Decoder(AgentSession)):
        if session.prefix_of is not None:
            continue
        _check_block_size(source, number, session, (block_tokens, reading.block_tokens))
        block_tokens = session.block_size
        start_s = reading.window_s * rng.random()
        session_number = rows.session_of(number)
        absolute = _is_absolute(source, number, session)
        absolute_sessions += absolute
        models = set()
        for at, (request, since_s) in enumerate(_flat(session, absolute)):
            models.add(request.model)
            shared = session.hash_id_scope == "global"
            scope = (_ALL_SESSIONS, request.model) if shared else session_number
            try:
                blocks = chains.add(request, scope)
            except ValueError as error:
                raise source.error(number, f"{error}; correct or remove the request") from None
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
        models_changed += len(models) > 1
    if models_changed:
        rows.remarks.append(
            f"{models_changed:,} of its sessions use more than one model; each counts as if one "
            "model served it"
        )
    if absolute_sessions:
        rows.remarks.append(
            f"times of sub-agents are taken as absolute in {absolute_sessions:,} of its sessions, "
            "because they are not before the sub-agents' starts"
        )
    rows.check_not_empty()
    rows.check_block_counts(np.array(rows.counts, np.int64))
    rows.check_whole_prompts(chains.heads)
    times = np.array(rows.times)  # composed: they begin at any time, in no order to warn about
    order = np.argsort(times, kind="stable")
    counts, ids = chains.ids(order)
    requests = rows.requests(Arrivals(times)).taken(order)
    trace = arrange(source.name, block_tokens, requests, counts, ids)
    return trace._replace(composed=True, remarks=tuple(rows.remarks))


def _check_block_size(
    source: Source, number: int, session: AgentSession, others: tuple[int, int | None]
) -> None:
    """Raise TraceError unless a session has the block size of those before and of the option."""
    before, given = others
    if before and session.block_size != before:
        raise source.error(
            number,
            f"block_size {session.block_size} after {before}: a trace has one block "
            "size; split the file by block size",
        )
    if given not in (None, session.block_size):
        raise source.error(
            number,
            f"block_size {session.block_size}, but {given} was given: ids cannot be "
            "converted to another block size; remove the option",
        )


def _flat(
    session: AgentSession,
    absolute: bool,  # noqa: FBT001  # a fact about the session
) -> Iterator[tuple[AgentRequest, float]]:
    """Yield (request, seconds since the session's start), with sub-agents' requests in place."""
    pending = [(request, 0.0) for request in reversed(session.requests)]
    while pending:
        request, since_s = pending.pop()  # `since_s`: when the agent that sent it started
        if request.requests is not None:
            since_s += 0.0 if absolute else request.t
            pending += [(inner, since_s) for inner in reversed(request.requests)]
            continue
        if request.sub is not None and not absolute:
            since_s = session.subagents[request.sub].t
        yield request, since_s + request.t


def _is_absolute(source: Source, number: int, session: AgentSession) -> bool:
    """Return whether times of sub-agents are from the session's start, and not from their own.

    A sub-agent's first request comes soon after the sub-agent's start, so the basis with the
    shorter gap is taken, unless the request would come before the start. Raises TraceError if
    sub-agents of one session disagree, or for a `sub` that does not exist.
    """
    starts_s: list[tuple[float, float]] = []  # of each sub-agent: its start, its first request
    first_s: dict[int, float] = {}
    pending = list(session.requests)
    while pending:
        request = pending.pop()
        if request.requests:
            starts_s.append((request.t, min(inner.t for inner in request.requests)))
            pending += request.requests
        elif request.sub is not None:
            if request.sub >= len(session.subagents):
                raise _unknown_sub_agent(source, number, request.t, request.sub, session)
            first_s[request.sub] = min(request.t, first_s.get(request.sub, math.inf))
    starts_s += [(session.subagents[sub].t, at_s) for sub, at_s in first_s.items()]
    found: dict[bool, tuple[float, float]] = {}
    for start_s, at_s in starts_s:
        after_s = at_s - start_s
        if abs(after_s) != abs(at_s):
            found[after_s >= -_EARLY_S and abs(after_s) < abs(at_s)] = start_s, at_s
    if len(found) > 1:
        (one_s, first), (other_s, second) = found[False], found[True]
        raise source.error(
            number,
            f"the first request of the sub-agent at {one_s:g} s is at {first:g} s, relative to it, "
            f"and that of the sub-agent at {other_s:g} s is at {second:g} s, absolute: one entry "
            "is relative, one absolute; write the times of all sub-agents in the same way",
        )
    return True in found


def _unknown_sub_agent(
    source: Source, number: int, at_s: float, sub: int, session: AgentSession
) -> TraceError:
    return source.error(
        number,
        f"request at {at_s:g} s: sub {sub}, but there are {len(session.subagents)} subagents; "
        "correct or remove the request",
    )
