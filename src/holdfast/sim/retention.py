"""What a store hits that keeps every block for a fixed time after its last use, and its size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import MICROS, Floats, Longs, Trace


class Retention(NamedTuple):
    """A store without a limit on space that drops each block `ttl_s` after its last use.

    A use at exactly `ttl_s` still hits. `mean_blocks` is taken over the trace's span, from the
    first arrival to the last, and `peak_blocks` is the most at any time.
    """

    ttl_s: float
    token_hit: float
    block_hit: float
    mean_blocks: float
    peak_blocks: int


def retention(trace: Trace, ttls_s: list[float], runs: Reuse | None = None) -> list[Retention]:
    """One row for each time to live; `runs` are those of `reuse(trace)`, if known."""
    runs = reuse(trace) if runs is None else runs
    gaps = gaps_s(trace, runs)
    tokens = run_tokens(trace, runs)
    inputs = int(trace.input_tokens.sum())
    rows = []
    for ttl_s in ttls_s:
        hit = gaps <= ttl_s
        mean, peak = _space(trace, runs, ttl_s)
        token_hit = float(tokens[hit].sum()) / inputs if inputs else 0.0
        block_hit = float(runs.blocks[hit].sum()) / trace.blocks if trace.blocks else 0.0
        rows.append(Retention(ttl_s, token_hit, block_hit, mean, peak))
    return rows


def gaps_s(trace: Trace, runs: Reuse) -> Floats:
    """[m] seconds since the use before, for each run, in whole microseconds."""
    gaps: Floats = np.round(trace.time_s[runs.request] - trace.time_s[runs.previous], MICROS)
    return gaps


def run_tokens(trace: Trace, runs: Reuse) -> Longs:
    """[m] the input tokens in each run; fewer than its blocks could hold where the last is cut."""
    size = trace.block_tokens
    limit = trace.input_tokens[runs.request]
    ends: Longs = np.minimum((runs.depth + runs.blocks) * size, limit)
    starts: Longs = np.minimum(runs.depth * size, limit)
    return ends - starts


def _space(trace: Trace, runs: Reuse, ttl_s: float) -> tuple[float, int]:
    """The mean and the most blocks that are kept.

    Blocks enter with a request, unless they are still there, and leave `ttl_s` after a use that is
    not followed by another in time.
    """
    gaps = gaps_s(trace, runs)
    lapsed = gaps > ttl_s
    used_last = np.diff(trace.starts) - _per_request(trace, runs.previous, runs.blocks)
    unused_s = np.minimum(trace.span_s - trace.time_s, ttl_s)
    block_seconds = runs.blocks @ np.minimum(gaps, ttl_s) + used_last @ unused_s
    mean = float(block_seconds) / trace.span_s if trace.span_s else float(trace.unique)

    there = _per_request(trace, runs.request[~lapsed], runs.blocks[~lapsed])
    enters = np.diff(trace.starts) - there
    leaves = np.concatenate((runs.blocks[lapsed], used_last))
    ends_s = np.concatenate((trace.time_s[runs.previous[lapsed]], trace.time_s)) + ttl_s
    ends_s = np.round(ends_s, MICROS)
    order = np.argsort(ends_s, kind="stable")
    left = np.concatenate(([0], np.cumsum(leaves[order])))
    before = np.searchsorted(ends_s[order], trace.time_s)  # who enters meets who leaves just then
    return mean, int((np.cumsum(enters) - left[before]).max(initial=0))


def _per_request(trace: Trace, requests: Longs, blocks: Longs) -> Longs:
    """[n] sums of `blocks` by request."""
    return np.bincount(requests, weights=blocks, minlength=trace.requests).astype(np.int64)
