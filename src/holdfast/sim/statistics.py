"""What a trace looks like, in the figures that decide how much of it a store can serve."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from holdfast.sim.retention import gaps_s, run_tokens
from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import Floats, Longs, Trace

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_NAMES = ("p10", "p25", "p50", "p75", "p90", "p95", "p99")


class Statistics(Struct, frozen=True):
    """The figures of one trace; quantiles are by their names, `p50` and so on.

    `infinite_*` are hits of a store that never evicts: as a share of all input tokens, of all block
    accesses, and as the mean of each request's share of its tokens. `one_hit` is the share of
    different blocks that are used once. `reuse_s` are the seconds since the use before, over all
    block hits of that store.
    """

    name: str
    requests: int
    sessions: int
    span_s: float
    block_tokens: int
    input_mean: float
    input_tokens: dict[str, float]
    output_mean: float
    output_tokens: dict[str, float]
    blocks: int
    unique_blocks: int
    unique_tokens: int
    infinite_token_hit: float
    infinite_block_hit: float
    infinite_request_hit: float
    requests_with_a_hit: float
    one_hit: float
    reuse_s: dict[str, float]


def statistics(trace: Trace, runs: Reuse | None = None) -> Statistics:
    """Take the figures of a trace; `runs` are those of `reuse(trace)`, if known."""
    runs = reuse(trace) if runs is None else runs
    tokens = np.bincount(runs.request, weights=run_tokens(trace, runs), minlength=trace.requests)
    inputs = int(trace.input_tokens.sum())
    asked = trace.input_tokens > 0
    unique = trace.unique
    uses = np.bincount(trace.ids, minlength=unique)
    return Statistics(
        name=trace.name,
        requests=trace.requests,
        sessions=len(np.unique(trace.session[trace.session >= 0])),
        span_s=trace.span_s,
        block_tokens=trace.block_tokens,
        input_mean=_mean(trace.input_tokens),
        input_tokens=_quantiles(trace.input_tokens.astype(np.float64)),
        output_mean=_mean(trace.output_tokens),
        output_tokens=_quantiles(trace.output_tokens.astype(np.float64)),
        blocks=trace.blocks,
        unique_blocks=unique,
        unique_tokens=unique * trace.block_tokens,
        infinite_token_hit=float(tokens.sum()) / inputs if inputs else 0.0,
        infinite_block_hit=float(runs.blocks.sum()) / trace.blocks if trace.blocks else 0.0,
        infinite_request_hit=_mean(tokens[asked] / trace.input_tokens[asked]),
        requests_with_a_hit=_mean((tokens > 0).astype(np.int64)),
        one_hit=_mean((uses == 1).astype(np.int64)),
        reuse_s=_weighted(gaps_s(trace, runs), runs.blocks),
    )


def _mean(values: Longs | Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantiles(values: Floats) -> dict[str, float]:
    """Quantiles; the larger of two values where one falls between them."""
    if not len(values):
        return {}
    found = np.quantile(values, SHARES, method="higher")
    return dict(zip(_NAMES, found.tolist(), strict=True))


def _weighted(values: Floats, weights: Longs) -> dict[str, float]:
    """The smallest values that at least these shares of the weights don't exceed."""
    if not len(values):
        return {}
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    at = np.searchsorted(sums, np.ceil(np.array(SHARES) * float(sums[-1])))
    return dict(zip(_NAMES, values[order][at].tolist(), strict=True))
