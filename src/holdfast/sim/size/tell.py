"""Say a proposal in words: what it assumes, and what a reader has to know to disagree."""

from __future__ import annotations

from math import ceil

import numpy as np

from holdfast.sim.formulas import GB
from holdfast.sim.size.need import BUSY, FETCH_SHARE, Need
from holdfast.sim.size.question import GPU_BUSY, Question

_TB = 1e12


def size_text(nbytes: float) -> str:
    """Return bytes in decimal units, three digits."""
    rounded = float(f"{nbytes:.3g}")  # before the unit is chosen: 999.9 GB are 1 TB
    for unit, size in (("PB", 1e15), ("TB", _TB), ("GB", GB)):
        if rounded >= 1000 * size:
            return f"{nbytes / size:,.0f} {unit}"
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded / 1e6:.3g} MB"


def figure_text(value: float) -> str:
    """Return a figure with three digits, and all of them before the point."""
    return f"{value:,.0f}" if float(f"{value:.3g}") >= 1000 else f"{value:.3g}"  # noqa: PLR2004


def ladder_text(need: Need) -> str:
    """Return the tiers of a proposal in one line."""
    tiers = (f"{size_text(tier.capacity_bytes)} {tier.medium}" for tier in need.tiers)
    return " + ".join(tiers) or "no context memory"


def million_tokens_dollars(question: Question, need: Need) -> float:
    """Return the dollars for a million input tokens: prefill, storage and its power."""
    tokens = question.demand.requests_per_s * 3600 * float(question.demand.input_tokens.mean())
    return need.dollars_per_h / tokens * 1e6


def assumptions(question: Question) -> list[str]:
    """Return every assumption behind a proposal, with its figure."""
    shape, site, demand = question.shape, question.profile.site, question.demand
    typical = max(1, int(demand.input_tokens.mean()))
    [fixed] = question.fixed_bytes(np.array([float(typical)]))
    compute_s = shape.prefill_flop(typical) / question.flop_per_s
    even = shape.context_bytes(typical, question.dtype) / compute_s / GB
    return [
        (
            f"KV state: {question.token_bytes:,.0f} bytes a token in {question.dtype}, "
            f"{fixed / 1e6:,.1f} MB a context beside it; one copy of each context"
        ),
        (
            f"prefill: {figure_text(shape.active_parameters / 1e9)}B active parameters, "
            f"{question.gpus} GPUs at {site.prefill_utilisation.mid:.0%} of "
            f"{question.gpu.flop_per_s.mid / 1e12:,.0f} TFLOP/s; {GPU_BUSY:.0%} busy on "
            "the average and all of them in the busiest minute at most, so that waiting for a GPU "
            "is left out; decode is not counted"
        ),
        (
            f"above {figure_text(even)} GB/s, fetching {typical:,} tokens beats computing them; a "
            f"fetch is given {FETCH_SHARE:.0%} of the time that it saves, or what the wish leaves"
        ),
        (
            f"an engine takes in at most {question.link_bytes_per_s / GB:,.0f} GB/s, "
            f"{question.network_bytes_per_s / GB:,.0f} of it by network, and needs "
            f"{question.overhead_s:.2f} s a request beside loading and computing"
        ),
        (
            f"{question.device_tokens:,.0f} tokens fit into the GPUs of one engine beside the "
            "weights: the engine's own cache, left out here"
        ),
        (
            "requests go to the node that holds their context, or it is in a pool; stores "
            "evict what was used least recently; a lower tier holds what the upper ones hold too"
        ),
        (
            f"bandwidth is shared fairly and {BUSY:.0%} busy at most; the busiest minute has "
            f"{figure_text(demand.peak)} times the average"
        ),
        (
            f"prices: {question.prices} of the ranges of {question.profile.date}; hardware is paid "
            f"off in {site.amortised_years.mid:g} years, power costs "
            f"${site.dollars_per_kwh.mid:g} a kWh, buildings add "
            f"{site.power_overhead.mid - 1:.0%}; machines around the tiers are left out"
        ),
        *_conditions(question),
    ]


def _conditions(question: Question) -> list[str]:
    """Return what is assumed of some models and some questions only."""
    shape, inputs = question.shape, question.demand.input_tokens.astype(np.float64)
    said = []
    if any(part.kind in ("window", "chunk") for part in shape.attention):
        said.append(
            "of windowed layers only the last window of a context is kept, so a context is used "
            "as far as an earlier request ended, or not at all"
        )
    machines = ceil(question.engines(question.prefill_s(0 * inputs, inputs)))
    if 0 < question.nodes < machines:
        said.append(
            f"without memory the load would take {machines:,} machines, not the {question.nodes:,} "
            "of --nodes"
        )
    if shape.recurrent:
        said.append(
            f"recurrent layers: a checkpoint of {shape.state_bytes() / 1e6:,.0f} MB is kept where "
            "a request ends, so a context is used as far as an earlier one ended, or not at all"
        )
    return said
