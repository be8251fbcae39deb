"""Replay a trace through one store of fixed size and an eviction policy: what share is served.

No tiers and no time to fetch or compute: only which blocks are there when a request comes. The
policy is the very object a running store uses; a block's id stands for its row and its name.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.policy.base import NEVER, Eviction
from holdfast.sim.trace import UNKNOWN, Floats, Ints, Trace

RUN_BLOCKS = 1 << 30
"""Runs as long as they are."""


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
    trace: Trace,
    capacity_blocks: int,
    policy: Eviction,
    hints: Floats | None = None,
    run_blocks: int = RUN_BLOCKS,
) -> Hits:
    """Serve each request the longest leading run of its blocks that is held, then hold them all.

    `hints[i]` is when the chain of request `i` is expected again: seconds of the trace, NEVER if
    its session is over, nan if unknown; see `returns`. What is held is looked up when a request
    arrives. Its own blocks are not evicted while it is served; of a chain longer than the store,
    the head stays.

    Blocks that every request uses together, `run_blocks` at most, are one row of the policy; they
    leave one by one all the same, from the end. For orders by time (`leaf_lru`, `cost_aware`) that
    changes nothing but the speed; for those that count (`s3fifo`, `lirs`) say 1.

    Raises ValueError for a capacity, or runs, below one block.
    """
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks: {capacity_blocks} holds nothing; 1 is the least")
    if run_blocks < 1:
        raise ValueError(f"run_blocks: {run_blocks} is no run; 1 is the least")
    runs = _runs(trace, run_blocks)
    shelf = _Shelf(capacity_blocks, policy, runs)
    times = trace.time_s.tolist()
    expected = [float("nan")] * trace.requests if hints is None else hints.tolist()
    hit_tokens = hit_blocks = 0
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        chain = runs.chains[runs.starts[request] : runs.starts[request + 1]]
        held = shelf.serve(chain, times[request], expected[request])
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


class _Runs(NamedTuple):
    """The trace in runs: blocks that every request uses together."""

    lengths: Ints
    """[runs] blocks of each run."""
    parents: list[int]
    """[runs] the run in front, -1 for the head of a chain."""
    starts: list[int]
    """[n + 1] where the runs of each request start in `chains`."""
    chains: Ints
    """The runs of each request, head first, end to end."""


def _runs(trace: Trace, most: int) -> _Runs:
    """Cut chains where not every request goes on, and after `most` blocks."""
    parents, uses = trace.parents(), np.bincount(trace.ids, minlength=trace.unique)
    depths = np.empty(trace.unique, np.int32)
    at = np.arange(len(trace.ids)) - np.repeat(trace.starts[:-1], np.diff(trace.starts))
    depths[trace.ids] = at
    # A block is used whenever one behind it is: used as often, they are used together.
    first = (parents < 0) | (uses != uses[parents])
    heads = np.where(first, depths, 0)  # depth of the first block of the run so far
    order = np.argsort(depths, kind="stable")
    levels = np.searchsorted(depths[order], np.arange(int(depths.max(initial=-1)) + 2))
    for level in range(1, len(levels) - 1):
        some = order[levels[level] : levels[level + 1]]
        some = some[~first[some]]
        heads[some] = heads[parents[some]]
    first |= (depths - heads) % most == 0
    number = np.cumsum(first) - 1  # in order of first appearance a run's blocks are consecutive
    fronts = parents[first]
    return _Runs(
        lengths=np.bincount(number, minlength=int(first.sum())).astype(np.int32),
        parents=np.where(fronts < 0, -1, number[fronts]).tolist(),
        starts=np.concatenate([[0], np.cumsum(first[trace.ids])])[trace.starts].tolist(),
        chains=number[trace.ids[first[trace.ids]]].astype(np.int32),
    )


class _Shelf:
    """How much of which runs is held, and room made for more."""

    def __init__(self, capacity: int, policy: Eviction, runs: _Runs) -> None:
        self._room = capacity
        self._capacity = capacity
        self._policy = policy
        self._lengths = runs.lengths
        self._parents = runs.parents
        self._held = np.zeros(len(runs.lengths), np.int32)
        self._serving = np.zeros(len(runs.lengths), bool)

    def serve(self, chain: Ints, now_s: float, again_s: float) -> int:
        """Use and hold the runs of one request; return how many leading blocks were held."""
        policy, held, lengths = self._policy, self._held[chain], self._lengths[chain]
        ends = np.cumsum(lengths)
        short = held < lengths
        whole = int(short.argmax()) if short.any() else len(chain)
        used = whole + int(whole < len(chain) and held[whole] > 0)
        hit = int(held[:used].sum())
        if used:
            policy.touch(chain[:used].tolist(), now_s)
        fits = int(np.searchsorted(ends - lengths, self._capacity))
        chain, lengths = chain[:fits], lengths[:fits].copy()
        if fits and ends[fits - 1] > self._capacity:
            lengths[-1] -= ends[fits - 1] - self._capacity
        wanted = int(lengths.sum()) - hit
        if wanted > 0:
            self._evict(wanted, chain, now_s)
            parents, new = self._parents, chain[used:].tolist()
            policy.insert(new, [parents[run] for run in new], new, now_s)
            self._held[chain] = lengths
            self._room -= wanted
        if again_s == again_s:  # noqa: PLR0124  # not nan
            policy.expect(chain.tolist(), again_s)
        return hit

    def _evict(self, wanted: int, chain: Ints, now_s: float) -> None:
        """Make room for so many blocks without any block of the chain being served."""
        missing = wanted - self._room
        if missing <= 0:
            return
        held, serving = self._held, self._serving
        serving[chain] = True
        for run in self._policy.victims(now_s):
            if serving[run]:
                continue
            gone = min(missing, int(held[run]))
            held[run] -= gone
            missing -= gone
            self._room += gone
            if not held[run]:
                self._policy.remove(run)
            if not missing:
                break
        serving[chain] = False
