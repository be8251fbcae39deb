"""What a ladder of given capacities needs to serve a load: bandwidth, units, wear, money, energy.

Closed formulas throughout. A tier shared by many readers gives each what the others leave: with a
load `r` on a bandwidth `B`, a fetch of `b` bytes takes `b / (B - r)` on the average (processor
sharing), so a tier needs `r + b / t` to bring `b` in `t` seconds. Tiers are read at the same time.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from holdfast.sim.formulas import GB, SECONDS_PER_DAY
from holdfast.sim.profile import Medium
from holdfast.sim.size.demand import Floats
from holdfast.sim.size.question import GPU_BUSY, REMOTE, Question

FETCH_SHARE = 0.5
"""Of the time that recomputing would take, a fetch may take this share (the planner's deadline)."""

BUSY = 0.8
"""Share of a bandwidth that is planned for; the rest is for what averages hide."""

HOURS_PER_YEAR = 8766.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
OBJECT_BYTES = 8e6
"""Bytes of one request to an object store: blocks of a segment are kept together."""


class Rung(NamedTuple):
    """A tier of a candidate: a medium of the profile and how many tokens it shall hold."""

    name: str
    tokens: float


class TierNeed(NamedTuple):
    """One tier of a ladder as it has to be built. Bandwidths in bytes/s, over all nodes."""

    medium: str
    tier: str
    unit: str
    capacity_bytes: float
    units: int
    spread: int
    """Over how many nodes the units are spread; a request is served by those of one."""
    bytes_per_s: float
    """Read bandwidth of all units."""
    request_bytes_per_s: float
    """What one request has to get of it."""
    traffic_bytes_per_s: float
    """Reads in the busiest minute."""
    written_bytes_per_s: float
    """Writes on the average."""
    writes_per_day: float
    """Of the bytes bought, how many are written a day: drive writes per day."""
    rated_writes_per_day: float | None
    """What the drives are rated for; None for media that do not wear."""
    bound: str
    """What decides the number of units: capacity, bandwidth or wear."""
    hit: float
    """Share of input tokens served from here."""
    dollars_per_h: float
    watts: float
    """On the average, with what the building adds."""


class Need(NamedTuple):
    """A ladder that serves a load within the wish, and what comes of it."""

    tiers: tuple[TierNeed, ...]
    hit: float
    ttft_s: tuple[float, float, float]
    """Of half of the requests, of the share that was wished for, and the mean."""
    within: float
    """Share of requests whose first token comes within the wish; 1 without one."""
    prefill_gpu_s_per_s: float
    """Engines (all GPUs of one) that are busy with prefill, on the average."""
    engines: float
    """Engines that prefill takes: some are idle, so that the busiest minute finds enough."""
    gpu_dollars_per_h: float
    """For all of these engines."""
    gpu_watts: float
    """On the average, with what the building adds; engines for bursts only draw none."""

    @property
    def dollars_per_h(self) -> float:
        """Storage, its power, and the GPUs' prefill."""
        return self.gpu_dollars_per_h + sum(tier.dollars_per_h for tier in self.tiers)

    @property
    def storage_dollars_per_h(self) -> float:
        """Storage and its power."""
        return sum(tier.dollars_per_h for tier in self.tiers)

    @property
    def watts(self) -> float:
        """Power of the storage on the average, with what the building adds."""
        return sum(tier.watts for tier in self.tiers)


class _Use(NamedTuple):
    """What the requests take from one tier: bytes of each, and the seconds it saves them."""

    rung: Rung
    medium: Medium
    nbytes: Floats
    hit: float
    saved_s: float


def need(question: Question, rungs: tuple[Rung, ...], held: dict[float, Floats]) -> Need | None:
    """Return what these rungs, smallest first, take to serve the load; None if they can not.

    `held` has `question.demand.held(capacity)` for each capacity in `rungs`, and for 0.
    """
    inputs = question.demand.input_tokens.astype(np.float64)
    uses = _uses(question, rungs, held)
    deepest = held[rungs[-1].tokens] if rungs else held[0.0]
    compute_s = question.prefill_s(deepest, inputs)
    request_rates = _request_rates(question, uses, compute_s)
    if request_rates is None:
        return None
    busy, engines = question.busy(compute_s), question.engines(compute_s)
    if 0 < question.nodes < engines:
        return None
    nodes = _nodes(question, uses, engines)
    tiers = tuple(
        _tier(question, use, rate, nodes, inputs - held[use.rung.tokens])
        for use, rate in zip(uses, request_rates, strict=True)
    )
    if not _carried(question, tiers, nodes) or not all(_has_room(question, t) for t in tiers):
        return None
    ttft_s = question.overhead_s + compute_s + _load_s(question, uses, tiers)
    wish = question.wish
    within = 1.0 if wish.ttft_s is None else float((ttft_s <= wish.ttft_s * (1 + 1e-9)).mean())
    quantiles = np.quantile(ttft_s, (0.5, wish.share), method="inverted_cdf")
    site = question.profile.site
    return Need(
        tiers=tiers,
        hit=float(deepest.sum() / inputs.sum()),
        ttft_s=(float(quantiles[0]), float(quantiles[1]), float(ttft_s.mean())),
        within=within,
        prefill_gpu_s_per_s=busy,
        engines=engines,
        gpu_dollars_per_h=engines * question.gpus * question.price(question.gpu.dollars_per_hour),
        gpu_watts=busy
        / GPU_BUSY
        * question.gpus
        * question.gpu.watts.mid
        * site.power_overhead.mid,
    )


def _uses(question: Question, rungs: tuple[Rung, ...], held: dict[float, Floats]) -> list[_Use]:
    """Split what is held among the rungs: each serves what the faster ones do not hold."""
    total = float(question.demand.input_tokens.sum())
    above, deepest, uses = held[0.0], held[rungs[-1].tokens] if rungs else held[0.0], []
    for rung in rungs:
        here = held[rung.tokens]
        tokens = here - above
        # Windows and recurrent states belong to the end of what is held: to the last tier used.
        fixed = question.fixed_bytes(here) * ((tokens > 0) & (here == deepest))
        uses.append(
            _Use(
                rung,
                question.profile.medium(rung.name),
                tokens * question.token_bytes + fixed,
                float(tokens.sum()) / total,
                float(question.prefill_s(above, here).mean()),
            )
        )
        above = here
    return uses


def _request_rates(question: Question, uses: list[_Use], compute_s: Floats) -> list[float] | None:
    """Return the bandwidth that one request has to get from each tier; None if none is enough.

    Enough for the wish, and for a fetch to take at most half of the time that it saves.
    """
    if not uses:
        ok = question.wish.ttft_s is None or bool(
            (question.overhead_s + compute_s <= question.wish.ttft_s).mean() >= question.wish.share
        )
        return [] if ok else None
    rates = [0.0] * len(uses)
    for i, use in enumerate(uses):
        allowed_s = FETCH_SHARE * use.saved_s - use.medium.latency_s.mid * float(
            (use.nbytes > 0).mean()
        )
        if use.hit <= 0 or allowed_s <= 0:
            return None  # it serves nothing, or its latency eats what it saves
        rates[i] = float(use.nbytes.mean()) / allowed_s
    if question.wish.ttft_s is not None:
        wished = _wished_rates(question, uses, compute_s)
        if wished is None:
            return None
        rates = [max(pair) for pair in zip(rates, wished, strict=True)]
    links = [question.into_engine(use.medium.tier) for use in uses]
    return rates if all(r <= link for r, link in zip(rates, links, strict=True)) else None


def _wished_rates(question: Question, uses: list[_Use], compute_s: Floats) -> list[float] | None:
    latest = question.wish.ttft_s or 0.0
    latency_s = sum((use.medium.latency_s.mid * (use.nbytes > 0) for use in uses), np.zeros(1))
    left_s = latest - question.overhead_s - compute_s - latency_s
    late = (left_s < 0) | (_into_engine_s(question, uses) > np.maximum(left_s, 0))
    spare = int((1 - question.wish.share) * len(compute_s) + 1e-9) - int(late.sum())
    if spare < 0:
        return None
    left_s = np.where(late, np.inf, np.maximum(left_s, 1e-12))  # late ones set no pace
    rates = []
    for use in uses:
        rate = np.sort(use.nbytes / left_s)
        rates.append(float(rate[len(rate) - 1 - spare // len(uses)]))
    return rates


def _tier(
    question: Question, use: _Use, request_rate: float, nodes: int, missed: Floats
) -> TierNeed:
    medium, demand = use.medium, question.demand
    peak = demand.requests_per_s * demand.peak
    traffic = peak * float(use.nbytes.mean())
    capacity = use.rung.tokens * question.stored_token_bytes
    # Of a window only what is new is written; a recurrent state changes with every token.
    saved = missed * question.token_bytes + question.fixed_bytes(missed)
    written = demand.requests_per_s * float(saved.mean())
    # A local tier is split among the nodes, and each has to bring a request at full speed.
    split = nodes if medium.tier in ("host", "disk") else 1
    read = medium.read_bytes_per_s.mid
    by_bandwidth = split * ceil(max(request_rate + traffic / split, traffic / split / BUSY) / read)
    by_writes = ceil(demand.peak * written / medium.write_bytes_per_s.mid)
    counts = {"bandwidth": max(by_bandwidth, by_writes)}
    if medium.unit_bytes is not None:
        size = medium.unit_bytes.mid
        counts["capacity"] = split * ceil(capacity / split / size)
        if medium.drive_writes_per_day is not None:
            wear = written * SECONDS_PER_DAY / (size * medium.drive_writes_per_day.mid)
            counts["wear"] = ceil(wear)
    bound = max(counts, key=lambda name: (counts[name], name == "capacity"))
    units = max(split, counts[bound])
    bought = units * medium.unit_bytes.mid if medium.unit_bytes is not None else capacity
    # Energy is paid for by the day, so it goes by the average, not by the busiest minute.
    watts = _watts(question, medium, units, traffic / demand.peak / (units * read))
    return TierNeed(
        medium=use.rung.name,
        tier=medium.tier,
        unit=medium.unit,
        capacity_bytes=capacity,
        units=units,
        spread=split,
        bytes_per_s=units * read,
        request_bytes_per_s=request_rate,
        traffic_bytes_per_s=traffic,
        written_bytes_per_s=written,
        writes_per_day=written * SECONDS_PER_DAY / bought,
        rated_writes_per_day=rated.mid if (rated := medium.drive_writes_per_day) else None,
        bound=bound,
        hit=use.hit,
        dollars_per_h=_dollars_per_h(question, medium, bought, (traffic / demand.peak, written))
        + watts / 1000 * question.price(question.profile.site.dollars_per_kwh),
        watts=watts,
    )


def _nodes(question: Question, uses: list[_Use], engines: float) -> int:
    """Return over how many machines the load is spread: as many as compute and links need."""
    peak = question.demand.requests_per_s * question.demand.peak
    traffic = peak * sum(float(use.nbytes.mean()) for use in uses)
    remote = peak * sum(float(use.nbytes.mean()) for use in uses if use.medium.tier in REMOTE)
    by_links = max(traffic / question.link_bytes_per_s, remote / question.network_bytes_per_s)
    return question.nodes or max(1, ceil(engines), ceil(by_links / BUSY))


def _carried(question: Question, tiers: tuple[TierNeed, ...], nodes: int) -> bool:
    """Whether the links of all engines, and their network, carry what all tiers send together."""
    remote = sum(tier.traffic_bytes_per_s for tier in tiers if tier.tier in REMOTE)
    whole = sum(tier.traffic_bytes_per_s for tier in tiers)
    return (
        whole <= question.link_bytes_per_s * nodes * BUSY
        and remote <= question.network_bytes_per_s * nodes * BUSY
    )


def _has_room(question: Question, tier: TierNeed) -> bool:
    """Whether a node has room for its share of the units."""
    room = question.profile.medium(tier.medium).units_per_node
    return room is None or tier.units <= tier.spread * room.mid


def _dollars_per_h(
    question: Question, medium: Medium, nbytes: float, flows: tuple[float, float]
) -> float:
    """Return what a tier costs beside its power: bought over its life, or rented by the month."""
    read, written = (flow * 3600 for flow in flows)  # bytes an hour
    price = question.price
    bought = price(medium.dollars_per_gb) / question.profile.site.amortised_years.mid
    rented = price(medium.dollars_per_gb_month) / HOURS_PER_MONTH
    stored = nbytes / GB * (bought / HOURS_PER_YEAR + rented)
    calls = read * price(medium.dollars_per_million_gets)
    calls += written * price(medium.dollars_per_million_puts)
    moved = read * price(medium.dollars_per_gb_out) + written * price(medium.dollars_per_gb_in)
    return stored + calls / OBJECT_BYTES / 1e6 + moved / GB


def _watts(question: Question, medium: Medium, units: int, busy: float) -> float:
    if medium.active_watts is None or medium.idle_watts is None:
        return 0.0
    idle, active = medium.idle_watts.mid, medium.active_watts.mid
    each = idle + (active - idle) * min(busy, 1.0)
    return units * each * question.profile.site.power_overhead.mid


def _load_s(question: Question, uses: list[_Use], tiers: tuple[TierNeed, ...]) -> Floats:
    """Return the seconds that each request waits for its context from the units that are bought."""
    longest = _into_engine_s(question, uses)
    for use, tier in zip(uses, tiers, strict=True):
        left = (tier.bytes_per_s - tier.traffic_bytes_per_s) / tier.spread
        rate = max(left, tier.request_bytes_per_s)
        load_s = use.medium.latency_s.mid * (use.nbytes > 0) + use.nbytes / rate
        longest = np.maximum(longest, load_s)
    return longest


def _into_engine_s(question: Question, uses: list[_Use]) -> Floats:
    """Return the seconds that each request's context takes over the links of an idle engine."""
    none = np.zeros(len(question.demand.input_tokens))
    whole = sum((use.nbytes for use in uses), none)
    remote = sum((use.nbytes for use in uses if use.medium.tier in REMOTE), none)
    slower: Floats = np.maximum(
        whole / question.link_bytes_per_s, remote / question.network_bytes_per_s
    )
    return slower
