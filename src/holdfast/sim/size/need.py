"""Bandwidth, units, wear, cost and energy that a ladder of given capacities needs for a load.

All are closed formulas. Readers share the bandwidth of a tier (processor sharing): at traffic `r`
on a bandwidth `B`, a fetch of `b` bytes takes `b / (B - r)` seconds on average. So a tier needs the
bandwidth `r + b / t` to deliver `b` bytes in `t` seconds. All tiers are read in parallel.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from holdfast.limits import STRIPE_TARGETS
from holdfast.plan.planner import SHARE as FETCH_SHARE
from holdfast.sim.amounts import GB, HOURS_PER_MONTH, HOURS_PER_YEAR, SECONDS_PER_DAY
from holdfast.sim.codec import RAW, TierEncoding
from holdfast.sim.paid_requests import PaidRequests, paid_requests
from holdfast.sim.profile import Medium
from holdfast.sim.size.question import GPU_BUSY, REMOTE, SizingGoal, SizingQuestion
from holdfast.sim.trace import Floats

BUSY = 0.8
"""Maximum mean utilisation of a bandwidth; the rest absorbs variation that a mean hides."""


PARITY_SHARE = 1 / (STRIPE_TARGETS - 1)
"""Bytes of parity records per byte of blocks in a pool of as many targets as it may stripe over."""


class CandidateTier(NamedTuple):
    """A tier of a candidate ladder: a medium of the profile, and its capacity in tokens."""

    name: str
    tokens: float


class TierNeed(NamedTuple):
    """One tier of a ladder, with the hardware it needs. Bandwidths are sums over all nodes."""

    medium: str
    tier: str
    unit: str
    capacity_bytes: float
    units: int
    unit_bytes: float | None
    """Capacity of a unit; None for a medium that is rented by the byte."""
    is_rented: bool
    """Whether it is paid by the month: by whole units, or by the byte."""
    units_per_node: int | None
    """Maximum units in one machine: a GPU machine, or a server of a pool."""
    spread: int
    """Number of nodes that the units are distributed over; one node's units serve a request."""
    codec_ratio: float
    """Raw bytes per stored byte; all other bytes of the tier are stored bytes."""
    bytes_per_s: float
    """Read bandwidth of all units."""
    request_bytes_per_s: float
    """Bandwidth that one request needs from the tier."""
    traffic_bytes_per_s: float
    """Reads in the busiest minute."""
    written_bytes_per_s: float
    """Mean writes."""
    writes_per_day: float
    """Drive writes per day: bytes written per day divided by bytes bought."""
    rated_writes_per_day: float | None
    """Drive writes per day that the drives are rated for; None for media that do not wear."""
    bound: str
    """What determines the number of units: capacity, bandwidth or wear."""
    hit: float
    """Share of input tokens served from this tier."""
    purchase_dollars: float
    """Price of all units; 0 if rented."""
    dollars_per_h: float
    """The purchase written off, or the rent, and power."""
    watts: float
    """Mean power, cooling and distribution included."""
    requests_per_h: PaidRequests | None
    """Requests of a medium that is paid by them; None for others."""
    request_dollars_per_h: float
    """Price of the requests, a part of `dollars_per_h`."""

    @property
    def bought_bytes(self) -> float:
        """Capacity of all units; of a rented medium, the bytes stored."""
        return self.capacity_bytes if self.unit_bytes is None else self.units * self.unit_bytes

    @property
    def units_for_capacity(self) -> int:
        """Number of units that hold the data, without regard to bandwidth and wear."""
        if self.unit_bytes is None:
            return self.units
        return self.spread * ceil(self.capacity_bytes / self.spread / self.unit_bytes)

    @property
    def servers(self) -> int:
        """Number of servers that a pool's units fill; 0 for tiers in GPU machines or rented."""
        if self.tier != "pool" or self.units_per_node is None:
            return 0
        return ceil(self.units / self.units_per_node)


class LadderNeed(NamedTuple):
    """A ladder that serves a load within the goal, its cost and its times to first token."""

    tiers: tuple[TierNeed, ...]
    hit: float
    ttft_s: tuple[float, float]
    """Median, and quantile at the goal's share of requests."""
    busy_engines: float
    """Mean number of engines (all GPUs of each) busy with prefill."""
    engines: float
    """Number of engines needed, with the idle ones that the busiest minute uses."""
    machines: int
    """Number of GPU machines, one engine each: as many as prefill and links need, or as given."""
    gpu_dollars_per_h: float
    """Cost of all these engines."""
    gpu_watts: float
    """Mean power, cooling and distribution included; engines idle outside bursts count as 0."""

    @property
    def dollars_per_h(self) -> float:
        """Cost of storage, its power, and the GPUs that prefill."""
        return self.gpu_dollars_per_h + self.storage_dollars_per_h

    @property
    def storage_dollars_per_h(self) -> float:
        """Cost of storage and its power."""
        return sum(tier.dollars_per_h for tier in self.tiers)

    @property
    def purchase_dollars(self) -> float:
        """Price of the storage; the GPUs are rented."""
        return sum(tier.purchase_dollars for tier in self.tiers)

    @property
    def watts(self) -> float:
        """Mean power of the storage, cooling and distribution included."""
        return sum(tier.watts for tier in self.tiers)


class _Use(NamedTuple):
    """Reads from one tier: the raw bytes of each request, and the mean seconds of prefill saved."""

    candidate_tier: CandidateTier
    medium: Medium
    nbytes: Floats
    hit: float
    saved_s: float
    encoding: TierEncoding

    @property
    def stored(self) -> Floats:
        """The stored bytes of each request."""
        return self.nbytes / self.encoding.ratio


def need(
    question: SizingQuestion,
    goal: SizingGoal,
    candidate: tuple[CandidateTier, ...],
    held: dict[float, Floats],
) -> LadderNeed | None:
    """Return what a candidate's tiers, smallest first, need to meet a goal; None if they cannot.

    `held` maps each capacity in `candidate`, and 0, to `question.demand.held(capacity)`.
    """
    inputs = question.demand.input_tokens
    # Each tier serves the held tokens that no faster tier holds.
    above, deepest = held[0.0], held[candidate[-1].tokens] if candidate else held[0.0]
    uses = []
    for candidate_tier in candidate:
        here = held[candidate_tier.tokens]
        tokens = here - above
        # Windows and states are read with the last held tokens: from the last tier read.
        fixed = question.fixed_bytes(here) * ((tokens > 0) & (here == deepest))
        uses.append(
            _Use(
                candidate_tier,
                question.profile.medium(candidate_tier.name),
                tokens * question.token_bytes + fixed,
                float(tokens.sum()) / float(inputs.sum()),
                float(question.prefill_s(above, here).mean()),
                question.encoding(candidate_tier.name),
            )
        )
        above = here
    compute_s = question.prefill_s(deepest, inputs)
    request_rates = _request_rates(question, goal, uses, compute_s)
    if request_rates is None and any(use.encoding is not RAW for use in uses):
        # A node that needs more than its decoders deliver keeps raw records.
        uses = [use._replace(encoding=RAW) for use in uses]
        request_rates = _request_rates(question, goal, uses, compute_s)
    if request_rates is None:
        return None
    busy, engines = question.busy_engines(compute_s), question.needed_engines(compute_s)
    peak = question.demand.peak_requests_per_s
    traffic = peak * sum(float(use.nbytes.mean()) for use in uses)
    remote = peak * sum(float(use.stored.mean()) for use in uses if use.medium.tier in REMOTE)
    by_links = max(traffic / question.link_bytes_per_s, remote / question.network_bytes_per_s)
    nodes_min = max(1, ceil(engines), ceil(by_links / BUSY))
    if 0 < question.nodes < nodes_min:
        return None
    nodes = question.nodes or nodes_min
    tiers = tuple(
        _tier(question, use, rate, nodes, inputs - held[use.candidate_tier.tokens])
        for use, rate in zip(uses, request_rates, strict=True)
    )
    if any(
        tier.units > tier.spread * tier.units_per_node
        for tier in tiers
        if tier.tier not in REMOTE and tier.units_per_node is not None
    ):
        return None  # the machines have not enough slots
    load_s = _link_s(question, uses)  # from the units that are bought
    for use, tier in zip(uses, tiers, strict=True):
        left = (tier.bytes_per_s - tier.traffic_bytes_per_s) / tier.spread
        rate = max(left, tier.request_bytes_per_s)
        raw_rate = use.encoding.delivered(rate)
        tier_s = use.medium.latency_s.mid * (use.nbytes > 0) + use.nbytes / raw_rate
        load_s = np.maximum(load_s, tier_s)
    ttft_s = question.overhead_s + compute_s + load_s
    quantiles = np.quantile(ttft_s, (0.5, goal.share), method="inverted_cdf")
    overhead = question.profile.site.power_overhead.mid
    return LadderNeed(
        tiers=tiers,
        hit=float(deepest.sum() / inputs.sum()),
        ttft_s=(float(quantiles[0]), float(quantiles[1])),
        busy_engines=busy,
        engines=engines,
        machines=nodes,
        gpu_dollars_per_h=engines * question.gpus * question.price(question.gpu.dollars_per_hour),
        gpu_watts=busy / GPU_BUSY * question.gpus * question.gpu.watts.mid * overhead,
    )


def _request_rates(
    question: SizingQuestion, goal: SizingGoal, uses: list[_Use], compute_s: Floats
) -> list[float] | None:
    """Return the raw bandwidth that one request needs from each tier; None if none suffices.

    It meets the goal, and limits a fetch to `FETCH_SHARE` of the compute time that it saves. The
    requests that may miss the goal are divided among the tiers: each tier leaves out that many of
    its most demanding requests.
    """
    if not uses:
        meets_goal = goal.ttft_s is None or bool(
            (question.overhead_s + compute_s <= goal.ttft_s).mean() >= goal.share
        )
        return [] if meets_goal else None
    rates = [0.0] * len(uses)
    for i, use in enumerate(uses):
        allowed_s = FETCH_SHARE * use.saved_s - use.medium.latency_s.mid * float(
            (use.nbytes > 0).mean()
        )
        if use.hit <= 0 or allowed_s <= 0:
            return None  # the tier serves nothing, or its latency exceeds the time it saves
        rates[i] = float(use.nbytes.mean()) / allowed_s
    if goal.ttft_s is not None:
        latency_s = sum((use.medium.latency_s.mid * (use.nbytes > 0) for use in uses), np.zeros(1))
        left_s = goal.ttft_s - question.overhead_s - compute_s - latency_s
        late = (left_s < 0) | (_link_s(question, uses) > np.maximum(left_s, 0))
        misses_left = int((1 - goal.share) * len(compute_s) + 1e-9) - int(late.sum())
        if misses_left < 0:
            return None  # too many requests miss the goal at any bandwidth
        # Late requests need no bandwidth.
        left_s = np.where(late, np.inf, np.maximum(left_s, 1e-12))
        for i, use in enumerate(uses):
            needed = np.sort(use.nbytes / left_s)
            rates[i] = max(rates[i], float(needed[len(needed) - 1 - misses_left // len(uses)]))
    links = [question.ingest_bytes_per_s(use.candidate_tier.name, use.encoding) for use in uses]
    return rates if all(r <= link for r, link in zip(rates, links, strict=True)) else None


def _tier(
    question: SizingQuestion, use: _Use, request_rate: float, nodes: int, missed: Floats
) -> TierNeed:
    """Size one tier for a raw bandwidth per request; `missed` are the tokens it does not hold.

    The tier moves and holds stored bytes; a pool holds and writes parity records beside them.
    """
    medium, demand, ratio = use.medium, question.demand, use.encoding.ratio
    request_rate /= ratio
    traffic = demand.peak_requests_per_s * float(use.stored.mean())
    copies = 1 + PARITY_SHARE if medium.tier == "pool" else 1
    capacity = copies * use.candidate_tier.tokens * question.stored_token_bytes / ratio
    # Only the new tokens of a window are written; a recurrent state is always written whole.
    saved = missed * question.token_bytes + question.fixed_bytes(missed)
    written = copies * demand.requests_per_s * float(saved.mean()) / ratio
    # A local tier is divided among the nodes; each node needs the bandwidth of one request.
    split = nodes if medium.tier in ("host", "disk") else 1
    read = medium.read_bytes_per_s.mid
    by_bandwidth = split * ceil(max(request_rate + traffic / split, traffic / split / BUSY) / read)
    by_writes = ceil(demand.peak * written / medium.write_bytes_per_s.mid)
    counts = {"bandwidth": max(by_bandwidth, by_writes)}
    if medium.unit_bytes is not None:
        size = medium.unit_bytes.mid
        counts["capacity"] = split * ceil(capacity / split / size)
        if medium.drive_writes_per_day is not None:
            endurance = medium.drive_writes_per_day.mid
            counts["wear"] = ceil(written * SECONDS_PER_DAY / (size * endurance))
    bound = max(counts, key=lambda name: (counts[name], name == "capacity"))
    units = max(split, counts[bound])
    bought = units * medium.unit_bytes.mid if medium.unit_bytes is not None else capacity
    purchase = bought / GB * question.price(medium.dollars_per_gb)
    read_mean = traffic / demand.peak  # energy and calls follow the mean, not the busiest minute
    # A rented medium costs by its bytes, its requests, and the bytes moved.
    price, read_per_h, written_per_h = question.price, read_mean * 3600, written * 3600
    stored = bought / GB * price(medium.dollars_per_gb_month) / HOURS_PER_MONTH
    calls = paid_requests(read_per_h, written_per_h, nodes, 3600)
    call_dollars_per_h = calls.dollars(medium, price)
    moved = read_per_h * price(medium.dollars_per_gb_out)
    moved += written_per_h * price(medium.dollars_per_gb_in)
    rent_dollars_per_h = stored + call_dollars_per_h + moved / GB
    overhead = question.profile.site.power_overhead.mid
    watts = medium.watts(units, read_mean + written) * overhead
    return TierNeed(
        medium=use.candidate_tier.name,
        tier=medium.tier,
        unit=medium.unit,
        capacity_bytes=capacity,
        units=units,
        unit_bytes=medium.unit_bytes.mid if medium.unit_bytes is not None else None,
        is_rented=medium.is_rented,
        units_per_node=int(most.mid) if (most := medium.units_per_node) else None,
        spread=split,
        bytes_per_s=units * read,
        codec_ratio=ratio,
        request_bytes_per_s=request_rate,
        traffic_bytes_per_s=traffic,
        written_bytes_per_s=written,
        writes_per_day=written * SECONDS_PER_DAY / bought,
        rated_writes_per_day=rated.mid if (rated := medium.drive_writes_per_day) else None,
        bound=bound,
        hit=use.hit,
        purchase_dollars=purchase,
        dollars_per_h=purchase / question.profile.site.amortised_years.mid / HOURS_PER_YEAR
        + rent_dollars_per_h
        + watts / 1000 * price(question.profile.site.dollars_per_kwh),
        watts=watts,
        requests_per_h=calls if call_dollars_per_h else None,
        request_dollars_per_h=call_dollars_per_h,
    )


def _link_s(question: SizingQuestion, uses: list[_Use]) -> Floats:
    """Return the seconds to load each request's context over the links of an idle engine."""
    none = np.zeros(len(question.demand.input_tokens))
    total = sum((use.nbytes for use in uses), none)
    remote = sum((use.stored for use in uses if use.medium.tier in REMOTE), none)
    slower: Floats = np.maximum(
        total / question.link_bytes_per_s, remote / question.network_bytes_per_s
    )
    return slower
