"""Hits and size of a store that keeps each block for a fixed time to live (TTL) after its use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import TIME_DECIMALS, Floats, Longs, Trace, share


class RetentionPoint(NamedTuple):
    """One point of a retention curve: an unlimited store that drops blocks `ttl_s` after their use.

    A use exactly `ttl_s` later still hits. `mean_blocks` is the mean from the first arrival to the
    last, `peak_blocks` the maximum.
    """

    ttl_s: float
    token_hit: float
    block_hit: float
    mean_blocks: float
    peak_blocks: int


def retention(trace: Trace, ttls_s: list[float], runs: Reuse | None = None) -> list[RetentionPoint]:
    """Return one point for each TTL; `runs` is `reuse(trace)` if the caller has it already."""
    runs = reuse(trace) if runs is None else runs
    gaps = gaps_s(trace, runs)
    tokens = run_tokens(trace, runs)
    inputs = int(trace.input_tokens.sum())
    used_last = np.diff(trace.starts) - trace.sum_by_request(runs.previous, runs.blocks)
    rows = []
    for ttl_s in ttls_s:
        hit = gaps <= ttl_s
        expired = ~hit
        unused_s = np.minimum(trace.span_s - trace.time_s, ttl_s)
        block_seconds = runs.blocks @ np.minimum(gaps, ttl_s) + used_last @ unused_s
        mean = float(block_seconds) / trace.span_s if trace.span_s else float(trace.unique)
        # Blocks enter with a request, unless they are held already, and leave `ttl_s` after their
        # last use before the TTL expires.
        held = trace.sum_by_request(runs.request[hit], runs.blocks[hit])
        enters = np.diff(trace.starts) - held
        leaves = np.concatenate((runs.blocks[expired], used_last))
        ends_s = np.concatenate((trace.time_s[runs.previous[expired]], trace.time_s)) + ttl_s
        ends_s = np.round(ends_s, TIME_DECIMALS)
        order = np.argsort(ends_s, kind="stable")
        left = np.concatenate(([0], np.cumsum(leaves[order])))
        before = np.searchsorted(ends_s[order], trace.time_s)  # blocks that leave now still count
        peak = int((np.cumsum(enters) - left[before]).max(initial=0))
        token_hit = share(float(tokens[hit].sum()), inputs)
        block_hit = share(float(runs.blocks[hit].sum()), trace.blocks)
        rows.append(RetentionPoint(ttl_s, token_hit, block_hit, mean, peak))
    return rows


def gaps_s(trace: Trace, runs: Reuse) -> Floats:
    """Return [m] the seconds since each run's previous use, rounded to microseconds."""
    gaps: Floats = np.round(trace.time_s[runs.request] - trace.time_s[runs.previous], TIME_DECIMALS)
    return gaps


def run_tokens(trace: Trace, runs: Reuse) -> Longs:
    """Return [m] the input tokens of each run; a partial last block counts its tokens only."""
    size = trace.block_tokens
    limit = trace.input_tokens[runs.request]
    ends: Longs = np.minimum((runs.depth + runs.blocks) * size, limit)
    starts: Longs = np.minimum(runs.depth * size, limit)
    return ends - starts
