"""Replay a trace through one store of fixed capacity, with an eviction policy of the store.

The replay has no tiers, and fetching and computing take no time: it only counts hits. A block's id
is both its row and its name for the policy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.policy.base import NEVER, EvictionPolicy
from holdfast.sim.runs import runs_of
from holdfast.sim.trace import UNKNOWN, Floats, Trace, share

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
    parents: list[int] = runs.parents().tolist()
    held_of = np.zeros(len(runs.lengths), np.int32)
    serving = np.zeros(len(runs.lengths), bool)
    free = capacity_blocks
    times = trace.time_s.tolist()
    expected = [float("nan")] * trace.requests if hints is None else hints.tolist()
    hit_tokens = hit_blocks = 0
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        now_s, again_s = times[request], expected[request]
        chain = runs.ids[runs.starts[request] : runs.starts[request + 1]]
        held, lengths = held_of[chain], runs.lengths[chain]
        short = held < lengths
        whole = int(short.argmax()) if short.any() else len(chain)
        used = whole + int(whole < len(chain) and held[whole] > 0)
        hit = int(held[:used].sum())
        hit_blocks += hit
        hit_tokens += min(hit * trace.block_tokens, tokens)
        if used:
            policy.touch(chain[:used].tolist(), now_s)
        ends = np.cumsum(lengths)
        fits = int(np.searchsorted(ends - lengths, capacity_blocks))
        chain, lengths = chain[:fits], lengths[:fits].copy()
        if fits and ends[fits - 1] > capacity_blocks:
            lengths[-1] -= ends[fits - 1] - capacity_blocks
        wanted = int(lengths.sum()) - hit
        missing = wanted - free
        if wanted > 0 and missing > 0:  # evict, but not the chain that is being served
            serving[chain] = True
            for run in policy.victims(now_s):
                if serving[run]:
                    continue
                gone = min(missing, int(held_of[run]))
                held_of[run] -= gone
                missing -= gone
                free += gone
                if not held_of[run]:
                    policy.remove(run)
                if not missing:
                    break
            serving[chain] = False
        if wanted > 0:
            new = chain[used:].tolist()
            policy.insert(new, [parents[run] for run in new], new, now_s)
            held_of[chain] = lengths
            free -= wanted
        if again_s == again_s:  # noqa: PLR0124  # not nan
            policy.expect(chain.tolist(), again_s)
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
