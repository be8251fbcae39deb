"""Statistics of a trace: lengths, distinct blocks, reuse times and the best possible hit rates."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from holdfast.sim.retention import gaps_s, run_tokens
from holdfast.sim.reuse import Reuse, reuse
from holdfast.sim.trace import Floats, Longs, Trace, share

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_NAMES = ("p10", "p25", "p50", "p75", "p90", "p95", "p99")


class Statistics(Struct, frozen=True):
    """The statistics of one trace; quantiles are keyed by name, such as `p50`.

    `infinite_*` are hit rates of a store that never evicts: over all input tokens, over all block
    accesses, and as the mean of the requests' token hit rates. `one_hit` is the share of distinct
    blocks that are used once. `reuse_s` is the time since the previous use, over all block hits of
    such a store.
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
    """Return the statistics; `runs` is `reuse(trace)` if the caller has it already."""
    runs = reuse(trace) if runs is None else runs
    tokens = trace.sum_by_request(runs.request, run_tokens(trace, runs))
    inputs = int(trace.input_tokens.sum())
    filled = trace.input_tokens > 0
    unique = trace.unique
    uses = np.bincount(trace.ids, minlength=unique)
    reuse_s: dict[str, float] = {}
    if len(runs.blocks):  # weighted quantiles: the smallest gap that covers each share of blocks
        gaps = gaps_s(trace, runs)
        order = np.argsort(gaps, kind="stable")
        sums = np.cumsum(runs.blocks[order])
        at = np.searchsorted(sums, np.ceil(np.array(QUANTILES) * float(sums[-1])))
        reuse_s = dict(zip(_NAMES, gaps[order][at].tolist(), strict=True))
    return Statistics(
        name=trace.name,
        requests=trace.requests,
        sessions=len(np.unique(trace.session[trace.session >= 0])),
        span_s=trace.span_s,
        block_tokens=trace.block_tokens,
        input_mean=mean(trace.input_tokens),
        input_tokens=_quantiles(trace.input_tokens.astype(np.float64)),
        output_mean=mean(trace.output_tokens),
        output_tokens=_quantiles(trace.output_tokens.astype(np.float64)),
        blocks=trace.blocks,
        unique_blocks=unique,
        unique_tokens=unique * trace.block_tokens,
        infinite_token_hit=share(float(tokens.sum()), inputs),
        infinite_block_hit=share(float(runs.blocks.sum()), trace.blocks),
        infinite_request_hit=mean(tokens[filled] / trace.input_tokens[filled]),
        requests_with_a_hit=mean((tokens > 0).astype(np.int64)),
        one_hit=mean((uses == 1).astype(np.int64)),
        reuse_s=reuse_s,
    )


def mean(values: Longs | Floats) -> float:
    """Return the mean; 0 of no values."""
    return float(values.mean()) if len(values) else 0.0


def _quantiles(values: Floats) -> dict[str, float]:
    """Return the quantiles by name; between two values, the larger one."""
    if not len(values):
        return {}
    found = np.quantile(values, QUANTILES, method="higher")
    return dict(zip(_NAMES, found.tolist(), strict=True))
