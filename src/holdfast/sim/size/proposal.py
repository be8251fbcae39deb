"""The text of a sizing: advice, tiers, figures, what to buy, alternatives, and assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np

from holdfast.limits import STRIPE_TARGETS
from holdfast.plan.planner import SHARE as FETCH_SHARE
from holdfast.sim.amounts import GB, HOURS_PER_YEAR, duration_text, figure_text, size_text
from holdfast.sim.size.need import BUSY, PARITY_SHARE, LadderNeed, TierNeed
from holdfast.sim.size.question import GPU_BUSY, SizingQuestion
from holdfast.sim.size.search import SizingAnswer

_LOWEST = {
    "host": "host only",
    "disk": "down to disk",
    "pool": "down to a pool",
    "files": "down to shared files",
    "object": "down to an object store",
}
"""Name of an alternative by the kind of its lowest tier."""

_NEARLY_THE_COST = 1.1
"""Up to this ratio to the lowest cost, a ladder that is much cheaper to buy is named."""

_MUCH_CHEAPER = 0.5
"""Ratio to the proposed purchase below which a ladder is much cheaper to buy."""


def proposal_lines(question: SizingQuestion, found: SizingAnswer) -> Iterator[str]:
    """Yield the lines of the whole text."""
    best, without, share = found.best, found.without, question.goal.share
    yield from (question.shape.name, question.demand.about, "", advice(question, found), "")
    if best.tiers:
        heads = ("tier", "medium", "holds", "bought", "bound by", "GB/s: one request", "busiest")
        table: list[tuple[str, ...]] = [(*heads, "all", "hits", "DWPD", "W", "$/h")]
        for tier in best.tiers:
            worn = "-"
            if tier.rated_writes_per_day is not None:
                worn = f"{tier.writes_per_day:.2f} of {tier.rated_writes_per_day:g}"
            table.append(
                (
                    tier.tier,
                    tier.medium,
                    size_text(tier.capacity_bytes),
                    _count(tier.units, tier.unit),
                    tier.bound,
                    f"{tier.request_bytes_per_s / GB:,.1f}",
                    f"{tier.traffic_bytes_per_s / GB:,.1f}",
                    f"{tier.bytes_per_s / GB:,.1f}",
                    f"{tier.hit:.1%}",
                    worn,
                    f"{tier.watts:,.0f}",
                    f"{tier.dollars_per_h:,.2f}",
                )
            )
        yield from (*_columns(table), "")
    yield f"hits           {best.hit:.1%} of input tokens"
    yield (
        f"first token    {best.ttft_s[1]:.2f} s for {share:.0%} of requests, "
        f"{best.ttft_s[0]:.2f} s for half; computed {without.ttft_s[1]:.2f} and "
        f"{without.ttft_s[0]:.2f} s"
    )
    yield (
        f"prefill        {best.busy_engines:.2f} engines busy of {best.engines:.2f}, "
        f"without memory {without.busy_engines:.2f} of {without.engines:.2f}"
    )
    storage = best.storage_dollars_per_h / best.dollars_per_h if best.dollars_per_h else 0.0
    yield (
        f"cost           ${best.dollars_per_h:,.2f} an hour, {storage:.0%} of it storage; without "
        f"memory ${without.dollars_per_h:,.2f}"
    )
    yield (
        f"               ${million_tokens_dollars(question, best):.4f} per million input tokens; "
        f"without memory ${million_tokens_dollars(question, without):.4f}"
    )
    for tier in best.tiers:
        if (calls := tier.requests_per_h) is not None:
            yield (
                f"requests       {tier.medium}: {calls.gets:,.0f} GET, {calls.puts:,.0f} PUT and "
                f"{calls.lists:,.0f} LIST an hour, ${tier.request_dollars_per_h:,.2f} of its cost"
            )
    yield "               not counted: decode, network, staff, storage servers but for their drives"
    yield from _purchase_lines(question, best)
    yield (
        f"energy         {kwh_a_day(best):,.0f} kWh a day: {best.watts / 1000:,.2f} kW of "
        f"storage, {best.gpu_watts / 1000:,.2f} of prefill; without memory "
        f"{kwh_a_day(without):,.0f} kWh"
    )
    yield from ("", "alternatives, each the cheapest that meets the goal")
    rows: list[Sequence[str]] = [
        ("", "$/h", "to buy", "first token", "hits", "engines", "ladder"),
        _alternative("compute everything", without),
    ]
    if question.goal.ttft_s is not None and without.ttft_s[1] > question.goal.ttft_s:
        rows[-1] = (*rows[-1][:-1], "misses the goal")
    for kind, lowest in found.by_lowest_tier.items():
        if lowest is None:
            rows.append((_LOWEST[kind], "-", "-", "-", "-", "-", "none meets the goal"))
        else:
            rows.append(_alternative(_LOWEST[kind], lowest))
    yield from (f"  {line}" for line in _columns(rows))
    yield from ("", "the cheapest for other times to first token")
    for need in found.frontier:
        yield (
            f"  {need.ttft_s[1]:8.2f} s  ${need.dollars_per_h:10,.2f} an hour  {ladder_text(need)}"
        )
    yield from ("", f"assumed ({found.tried} ladders were tried)")
    yield from (f"  - {line}" for line in assumptions(question))


def advice(question: SizingQuestion, found: SizingAnswer) -> str:
    """Return what to buy or rent, what it saves, and when it has paid for itself."""
    best, without = found.best, found.without
    if not best.tiers:
        return "Buy nothing: computing every token is cheapest, because no tier saves its cost."
    bought = [_units_text(tier) for tier in best.tiers if not tier.is_rented]
    rented = [
        f"{size_text(tier.capacity_bytes)} of {tier.medium}"
        if tier.unit_bytes is None
        else _units_text(tier)
        for tier in best.tiers
        if tier.is_rented
    ]
    parts = [f"buy {' and '.join(bought)} for ${best.purchase_dollars:,.0f}"] if bought else []
    parts += [f"rent {' and '.join(rented)}"] if rented else []
    sentence = " and ".join(parts)
    text = f"{sentence[0].upper()}{sentence[1:]}."
    years = question.profile.site.amortised_years.mid
    written_off_per_h = best.purchase_dollars / (years * HOURS_PER_YEAR)
    saved_per_h = without.dollars_per_h - best.dollars_per_h + written_off_per_h
    if best.dollars_per_h >= without.dollars_per_h:
        more = best.dollars_per_h - without.dollars_per_h
        return (
            f"{text} This costs ${more:,.2f} an hour more than computing every token, which takes "
            f"{without.ttft_s[1]:.2f} s to the first token."
        )
    text += f" This saves ${saved_per_h:,.2f} an hour of engines"
    if best.purchase_dollars:
        text += f" and pays for itself in {duration_text(best.purchase_dollars / saved_per_h)}"
    # Name a ladder of nearly the same cost that is much cheaper to buy.
    near = [
        need
        for need in found.by_lowest_tier.values()
        if need is not None
        and need.dollars_per_h <= best.dollars_per_h * _NEARLY_THE_COST
        and need.purchase_dollars < best.purchase_dollars * _MUCH_CHEAPER
    ]
    if not near:
        return f"{text}."
    least = min(near, key=lambda need: need.purchase_dollars)
    more = least.dollars_per_h / best.dollars_per_h - 1
    return (
        f"{text}. For ${least.purchase_dollars:,.0f}, {ladder_text(least)} is enough at "
        f"${least.dollars_per_h:,.2f} an hour, {more:.0%} more."
    )


def _units_text(tier: TierNeed) -> str:
    """Return the units of a tier that is bought: "6 drives of 30.7 TB (nvme-tlc)"."""
    size = size_text(tier.unit_bytes or 0.0)
    return f"{_count(tier.units, tier.unit)} of {size} ({tier.medium})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _purchase_lines(question: SizingQuestion, best: LadderNeed) -> Iterator[str]:
    """Yield what to buy, tier by tier with its price, and the machines that hold it."""
    label = "to buy"
    for tier in best.tiers:
        if not tier.is_rented:
            least = tier.units_for_capacity
            why = f"; {least:,} would hold the data" if least < tier.units else ""
            yield (
                f"{label:<15}${tier.purchase_dollars:,.0f}: {_units_text(tier)}, "
                f"{size_text(tier.bought_bytes)} in all{why}"
            )
            label = ""
    if sum(tier.purchase_dollars > 0 for tier in best.tiers) > 1:
        yield f"               ${best.purchase_dollars:,.0f} in all"
    gpus = f"{question.gpus} x {question.gpu.about}"
    in_each = [
        _count(-(-tier.units // tier.spread), tier.unit)
        for tier in best.tiers
        if tier.tier in ("host", "disk")
    ]
    yield f"machines       {best.machines:,}, each: {'; '.join([gpus, *in_each])}"
    for tier in best.tiers:
        if tier.servers:
            yield (
                f"               {_count(tier.servers, 'storage server')} with up to "
                f"{_count(tier.units_per_node or 0, tier.unit)} in each"
            )


def _alternative(name: str, need: LadderNeed) -> Sequence[str]:
    return (
        name,
        f"{need.dollars_per_h:,.2f}",
        f"${need.purchase_dollars:,.0f}",
        f"{need.ttft_s[1]:.2f} s",
        f"{need.hit:.1%}",
        f"{need.engines:.2f}",
        ladder_text(need),
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, with columns of equal width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def kwh_a_day(need: LadderNeed) -> float:
    """Return the energy of storage and prefill in a day."""
    return (need.watts + need.gpu_watts) * 24 / 1000


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
    break_even = (typical * question.token_bytes + fixed) / compute_s / GB
    lines = [
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
            f"{question.device_tokens:,.0f} tokens fit into the GPUs of one engine beside "
            f"{figure_text(shape.weights_bytes / GB)} GB of weights: the engine's own cache, which "
            "is not counted"
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
            f"prices: {question.price_level} of the ranges of {question.profile.date}; hardware is "
            f"written off in {site.amortised_years.mid:g} years, power costs "
            f"${question.price(site.dollars_per_kwh):g} per kWh, cooling and distribution add "
            f"{site.power_overhead.mid - 1:.0%}; the machines that hold the tiers are not counted"
        ),
    ]
    if encoded := [name for name in question.media if question.encoding(name).ratio != 1]:
        figures = question.profile.codec
        lines.append(
            f"{', '.join(encoded)}: records take 1/{figures.ratio.mid:g} of their raw bytes "
            f"(lossless codec, {question.dtype}), unless a request needs more than the "
            f"{figures.decode_bytes_per_s.mid * figures.decode_threads.mid / GB:g} GB/s that a "
            "node decodes; sizes and rates of these tiers count stored bytes; --codec off counts "
            "without"
        )
    lines += _parity_lines(question)
    if shape.windowed:
        lines.append(
            "windowed layers keep only the last window of a context, so a context is reused only "
            "up to a point where an earlier request ended"
        )
    computed_s = question.prefill_s(0 * demand.input_tokens, demand.input_tokens)
    machines = ceil(question.needed_engines(computed_s))
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
    return [*lines, *demand.notes]


def _parity_lines(question: SizingQuestion) -> list[str]:
    media = question.profile.medium
    pools = [name for name in question.media if media(name).tier == "pool"]
    if not pools:
        return []
    line = (
        f"{', '.join(pools)}: parity records add {PARITY_SHARE:.1%} to the bytes held and written, "
        f"as with {STRIPE_TARGETS} targets or more, so that contexts survive the loss of one"
    )
    return [line]
