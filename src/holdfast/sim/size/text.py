"""Text of a ladder, its cost, and the assumptions behind a sizing."""

from __future__ import annotations

from math import ceil

import numpy as np

from holdfast.sim.amounts import figure_text, size_text
from holdfast.sim.formulas import GB
from holdfast.sim.size.need import BUSY, FETCH_SHARE, LadderNeed
from holdfast.sim.size.question import GPU_BUSY, SizingQuestion


def ladder_text(need: LadderNeed) -> str:
    """Return the tiers of a proposal in one line."""
    tiers = (f"{size_text(tier.capacity_bytes)} {tier.medium}" for tier in need.tiers)
    return " + ".join(tiers) or "no context memory"


def million_tokens_dollars(question: SizingQuestion, need: LadderNeed) -> float:
    """Return the cost of a million input tokens: prefill, storage and its power."""
    tokens = question.demand.requests_per_s * 3600 * float(question.demand.input_tokens.mean())
    return need.dollars_per_h / tokens * 1e6


def assumptions(question: SizingQuestion) -> list[str]:
    """Return the assumptions behind a proposal, one per line, with their values."""
    shape, site, demand = question.shape, question.profile.site, question.demand
    typical = max(1, int(demand.input_tokens.mean()))
    [fixed] = question.fixed_bytes(np.array([float(typical)]))
    compute_s = shape.prefill_flop(typical) / question.flop_per_s
    break_even = shape.context_bytes(typical, question.dtype) / compute_s / GB
    return [
        (
            f"KV state: {question.token_bytes:,.0f} bytes per token in {question.dtype}, plus "
            f"{fixed / 1e6:,.1f} MB per context; one copy of each context"
        ),
        (
            f"prefill: {figure_text(shape.active_parameters / 1e9)}B active parameters, "
            f"{question.gpus} GPUs at {site.prefill_utilisation.mid:.0%} of "
            f"{question.gpu.flop_per_s.mid / 1e12:,.0f} TFLOP/s; at most "
            f"{GPU_BUSY:.0%} busy on average and all busy in the busiest minute, so waiting for a "
            "GPU is not modelled; decode is not counted"
        ),
        (
            f"above {figure_text(break_even)} GB/s, fetching {typical:,} tokens is faster than "
            f"computing them; a fetch takes at most {FETCH_SHARE:.0%} of the compute time that it "
            "saves, and no longer than the TTFT goal allows"
        ),
        (
            f"an engine reads at most {question.link_bytes_per_s / GB:,.0f} GB/s, "
            f"{question.network_bytes_per_s / GB:,.0f} of it over the network, and needs "
            f"{question.overhead_s:.2f} s per request besides loading and computing"
        ),
        (
            f"{question.device_tokens:,.0f} tokens fit into the GPUs of one engine beside the "
            "weights: the engine's own cache, which is not counted"
        ),
        (
            "a request is routed to the node that holds its context, unless a pool holds it; "
            "stores evict by LRU; a lower tier includes the contents of the upper tiers"
        ),
        (
            f"bandwidth is shared fairly and at most {BUSY:.0%} used; the busiest minute has "
            f"{figure_text(demand.peak)} times the mean rate"
        ),
        (
            f"prices: {question.prices} of the ranges of {question.profile.date}; hardware is "
            f"written off in {site.amortised_years.mid:g} years, power costs "
            f"${site.dollars_per_kwh.mid:g} per kWh, cooling and distribution add "
            f"{site.power_overhead.mid - 1:.0%}; the machines that hold the tiers are not counted"
        ),
        *_conditions(question),
    ]


def _conditions(question: SizingQuestion) -> list[str]:
    """Return the assumptions that apply to some models and questions only."""
    shape, inputs = question.shape, question.demand.input_tokens.astype(np.float64)
    lines = []
    if any(part.kind in ("window", "chunk") for part in shape.attention):
        lines.append(
            "windowed layers keep only the last window of a context, so a context is reused only "
            "up to a point where an earlier request ended"
        )
    machines = ceil(question.needed_engines(question.prefill_s(0 * inputs, inputs)))
    if 0 < question.nodes < machines:
        lines.append(
            f"without context memory the load takes {machines:,} machines, not the "
            f"{question.nodes:,} of --nodes"
        )
    if shape.recurrent:
        lines.append(
            f"recurrent layers keep a checkpoint of {shape.state_bytes() / 1e6:,.0f} MB where a "
            "request ends, so a context is reused only up to a point where an earlier request ended"
        )
    return lines
