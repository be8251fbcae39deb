"""Replay a trace through one store of fixed size and an eviction policy: what share is served.

No tiers and no time to fetch or compute: only which blocks are there when a request comes. The
policy is the very object a running store uses; a block's id stands for its row and its name.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.policy.base import NEVER, Eviction
from holdfast.sim.trace import UNKNOWN, Floats, Ints, Trace


class Hits(NamedTuple):
    """What a replay served, of what was asked for."""

    tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int

    @property
    def token_hit(self) -> float:
        """Share of all input tokens served."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def block_hit(self) -> float:
        """Share of all block accesses served."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


def replay(
    trace: Trace, capacity_blocks: int, policy: Eviction, hints: Floats | None = None
) -> Hits:
    """Serve each request the longest leading run of its blocks that is held, then hold them all.

    `hints[i]` is when the chain of request `i` is expected again: seconds of the trace, NEVER if
    its session is over, nan if unknown; see `returns`. What is held is looked up when a request
    arrives. Its own blocks are not evicted while it is served; of a chain longer than the store,
    the head stays. Raises ValueError for a capacity below one block.
    """
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks: {capacity_blocks} holds nothing; 1 is the least")
    shelf = _Shelf(capacity_blocks, policy, trace.parents())
    times = trace.time_s.tolist()
    expected = [float("nan")] * trace.requests if hints is None else hints.tolist()
    hit_tokens = hit_blocks = 0
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        held = shelf.serve(trace.chain(request), times[request], expected[request])
        hit_blocks += held
        hit_tokens += min(held * trace.block_tokens, tokens)
    return Hits(int(trace.input_tokens.sum()), hit_tokens, trace.blocks, hit_blocks)


def returns(trace: Trace) -> Floats:
    """[n] when the chain of each request is used again by its session, from the trace's future.

    A session's chain is told by its first block: a sub-agent is expected apart from the agent that
    waits for it. NEVER after the last; nan where the session is unknown or a request has no blocks.
    """
    known: dict[tuple[int, int], float] = {}
    expected = np.full(trace.requests, np.nan)
    heads = trace.ids[np.minimum(trace.starts[:-1], max(len(trace.ids) - 1, 0))]
    filled = np.diff(trace.starts) > 0
    for request in np.flatnonzero(filled & (trace.session != UNKNOWN))[::-1].tolist():
        chain = int(trace.session[request]), int(heads[request])
        expected[request] = known.get(chain, NEVER)
        known[chain] = float(trace.time_s[request])
    return expected


class _Shelf:
    """Which blocks are held, and room made for more."""

    def __init__(self, capacity: int, policy: Eviction, parents: Ints) -> None:
        self._room = capacity
        self._capacity = capacity
        self._policy = policy
        self._parents = parents.tolist()
        self._held = np.zeros(len(parents), bool)
        self._serving = np.zeros(len(parents), bool)

    def serve(self, chain: Ints, now_s: float, again_s: float) -> int:
        """Use and hold the blocks of one request; return how many leading ones were held."""
        policy = self._policy
        held = _leading(self._held[chain])
        new = chain[held : self._capacity]
        if held:
            policy.touch(chain[:held].tolist(), now_s)
        if len(new):
            self._evict(len(new), chain, now_s)
            insert, parents = policy.insert, self._parents
            for block in new[::-1].tolist():
                insert(block, parents[block], block, now_s)
            self._held[new] = True
            self._room -= len(new)
        if again_s == again_s:  # noqa: PLR0124  # not nan
            policy.expect(chain[: self._capacity].tolist(), again_s)
        return held

    def _evict(self, room: int, chain: Ints, now_s: float) -> None:
        """Make room for so many blocks without any block of the chain being served."""
        short = room - self._room
        if short <= 0:
            return
        gone: list[int] = []
        serving = self._serving
        serving[chain] = True
        pinned, remove = serving.__getitem__, self._policy.remove
        for block in self._policy.victims(now_s):
            if not pinned(block):
                remove(block)
                gone.append(block)
                if len(gone) == short:
                    break
        serving[chain] = False
        self._held[gone] = False
        self._room += len(gone)


def _leading(flags: np.ndarray) -> int:
    """How many leading flags are set."""
    first = int(flags.argmin()) if len(flags) else 0
    return len(flags) if len(flags) and flags[first] else first
