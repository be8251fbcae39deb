"""Replay a trace through one store of fixed capacity, with an eviction policy of the store.

The replay has no tiers, and fetching and computing take no time: it only counts hits. A block's id
is both its row and its name for the policy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.policy.base import NEVER, EvictionPolicy
from holdfast.sim.runs import Runs, runs_of
from holdfast.sim.trace import UNKNOWN, Floats, Ints, Trace, share

RUN_BLOCKS = 1 << 30
"""Default limit of blocks per run: no limit."""


class Hits(NamedTuple):
    """Tokens and blocks that the requests of a replay needed, and those that were hits."""

    tokens: int
    hit_tokens: int
    blocks: int
    hit_blocks: int

    @property
    def token_hit(self) -> float:
        """Share of all input tokens that were hits."""
        return share(self.hit_tokens, self.tokens)

    @property
    def block_hit(self) -> float:
        """Share of all block accesses that were hits."""
        return share(self.hit_blocks, self.blocks)


def replay(
    trace: Trace,
    capacity_blocks: int,
    policy: EvictionPolicy,
    hints: Floats | None = None,
    run_blocks: int = RUN_BLOCKS,
) -> Hits:
    """Serve each request its leading held blocks, then save all its blocks.

    `hints[i]` is when the chain of request `i` is expected again, in seconds of trace time: NEVER
    if its session is over, nan if unknown; see `returns`. The blocks of a request are not evicted
    while it is served. If a chain exceeds the capacity, its head is kept.

    A run of at most `run_blocks` blocks that all requests use together is one row of the policy;
    eviction still removes its blocks one at a time, from the tail. For policies that order by time
    (`leaf_lru`, `cost_aware`) runs change only the speed. Use 1 for policies that count rows
    (`s3fifo`, `lirs`).

    Raises ValueError for a capacity or a run length below one block.
    """
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks: {capacity_blocks}: give 1 or more")
    if run_blocks < 1:
        raise ValueError(f"run_blocks: {run_blocks}: give 1 or more")
    runs = runs_of(trace, run_blocks)
    store = _ReplayedStore(capacity_blocks, policy, runs)
    times = trace.time_s.tolist()
    expected = [float("nan")] * trace.requests if hints is None else hints.tolist()
    hit_tokens = hit_blocks = 0
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        chain = runs.ids[runs.starts[request] : runs.starts[request + 1]]
        held = store.serve(chain, times[request], expected[request])
        hit_blocks += held
        hit_tokens += min(held * trace.block_tokens, tokens)
    return Hits(int(trace.input_tokens.sum()), hit_tokens, trace.blocks, hit_blocks)


def returns(trace: Trace) -> Floats:
    """Return [n] when each request's chain is used again by its session, in seconds of trace time.

    The first block identifies a chain of a session, so sub-agents have times of their own. NEVER
    for the last use; nan if the session is unknown or a request has no blocks.
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


class _ReplayedStore:
    """The held blocks of each run, with eviction."""

    def __init__(self, capacity: int, policy: EvictionPolicy, runs: Runs) -> None:
        self._free = capacity
        self._capacity = capacity
        self._policy = policy
        self._lengths = runs.lengths
        self._parents: list[int] = runs.parents().tolist()
        self._held = np.zeros(len(runs.lengths), np.int32)
        self._serving = np.zeros(len(runs.lengths), bool)

    def serve(self, chain: Ints, now_s: float, again_s: float) -> int:
        """Use and save the runs of one request; return the number of leading blocks held."""
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
            self._free -= wanted
        if again_s == again_s:  # noqa: PLR0124  # not nan
            policy.expect(chain.tolist(), again_s)
        return hit

    def _evict(self, wanted: int, chain: Ints, now_s: float) -> None:
        """Evict until `wanted` blocks are free, without evicting the chain that is being served."""
        missing = wanted - self._free
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
            self._free += gone
            if not held[run]:
                self._policy.remove(run)
            if not missing:
                break
        serving[chain] = False
