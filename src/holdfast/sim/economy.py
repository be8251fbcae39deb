"""What a simulated fleet costs: dollars per million tokens out, and energy.

GPUs are paid by the second that they work, at their hourly price, which covers their memory and
power; work for which the run has no time is paid too, and `assumptions` says so. Whole units of
every other medium are bought and written off over the profile's years, and drink their idle power
plus the share of the rest in which they move bytes. Object stores are paid by the byte kept and by
request.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.sim.figures import Figure, Run
from holdfast.sim.formulas import SECONDS_PER_DAY
from holdfast.sim.hardware import Rung

HOUR_S = 3_600.0
YEAR_S = 365 * 86_400.0
MONTH_S = YEAR_S / 12
JOULES_PER_KWH = 3.6e6


class TierCost(NamedTuple):
    """What one tier of the ladder costs over a run, for all workers: dollars and joules."""

    name: str
    hardware: float
    power: float
    requests: float
    joules: float

    @property
    def dollars(self) -> float:
        """All of it."""
        return self.hardware + self.power + self.requests


def tier_costs(run: Run) -> list[TierCost]:
    """Return the cost of each tier; a tier without a medium of the profile has none."""
    return [
        _cost(run, tier, rung)
        for tier, rung in enumerate(run.fleet.hardware.rungs)
        if rung.medium and rung.kind != "device"
    ]


def economy_figures(run: Run) -> list[Figure]:
    """Dollars per million tokens out with the ladder and without, and energy per run."""
    gpu, gpus, out = run.fleet.hardware.gpu, run.fleet.hardware.gpus, run.output_tokens
    if gpu is None or not out:
        return []
    hourly, site = gpu.dollars_per_hour.mid, run.fleet.hardware.profile.site
    per_s = gpus * hourly / HOUR_S
    worked_s = run.prefill_s + run.decode_s
    bare_s = worked_s + float(run.requests.saved_s.sum())
    tiers = tier_costs(run)
    tier_dollars = sum(tier.dollars for tier in tiers)
    with_ladder = (worked_s * per_s + tier_dollars) / out * 1e6
    without = bare_s * per_s / out * 1e6
    joules = gpus * gpu.watts.mid * site.power_overhead.mid * worked_s
    spared = gpus * gpu.watts.mid * site.power_overhead.mid * (bare_s - worked_s)
    tier_joules = sum(tier.joules for tier in tiers)
    costs: dict[str, object] = {f"{tier.name}_dollars": tier.dollars for tier in tiers}
    return [
        Figure(
            "sim.cost.per_million_out", with_ladder, "$", {"gpu_dollars": worked_s * per_s} | costs
        ),
        Figure("sim.cost.without_ladder", without, "$", {"gpu_dollars": bare_s * per_s}),
        Figure(
            "sim.cost.gain", without / with_ladder - 1 if with_ladder else None, "more tokens per $"
        ),
        Figure(
            "sim.energy.gpu",
            joules / JOULES_PER_KWH,
            "kWh",
            {"spared_kwh": spared / JOULES_PER_KWH},
        ),
        Figure("sim.energy.tiers", tier_joules / JOULES_PER_KWH, "kWh"),
    ]


def assumptions(run: Run) -> list[str]:
    """Say in plain lines what the figures take for granted."""
    hardware, engine = run.fleet.hardware, run.fleet.hardware.engine
    cost, site = hardware.prefill, hardware.profile.site
    world = hardware.world
    token_bytes = world.payload_bytes / world.block_tokens
    formula = f"{cost.a:.3g} + {cost.b:.3g} n + {cost.c:.3g} n (m + n/2) s"
    rate = f"{engine.decode_tokens_per_s:g} tokens/s for each of {engine.decodes_at_once}"
    lines = [
        f"{token_bytes:,.0f} bytes of KV state a token, blocks of {world.block_tokens} tokens",
        f"prefill of n tokens behind m: {formula}, {engine.prefills_at_once} at a time",
        f"decoding: {rate} requests at once; it does not slow prefill",
        "only input is saved; an answer's KV state counts when it comes back as input",
    ]
    if hardware.gpu:
        lines.append(
            f"prices of {hardware.profile.date}: GPU ${hardware.gpu.dollars_per_hour.mid:g}/h and "
            f"only while it works, tiers written off in {site.amortised_years.mid:g} years, "
            f"${site.dollars_per_kwh.mid:g}/kWh times {site.power_overhead.mid:g}"
        )
    return lines + _strained(run)


def _strained(run: Run) -> list[str]:
    """Say where the figures hold less than they seem to: too few engines, and a short trace."""
    lines = []
    gpus, workers = run.fleet.hardware.gpus, len(run.fleet.workers)
    needs = [("", run.busy, run.span_s), ("without the ladder, ", run.bare_busy, run.bare_span_s)]
    for which, busy, span_s in needs:
        if busy > 1:
            there = workers * gpus * span_s / HOUR_S
            lines.append(
                f"{which}prefill and decoding need {busy:.2f} of the engines there are, "
                f"{_hours(busy * there)} GPU hours of {_hours(there)}: dollars and energy are of "
                "the hours needed, and answers would come later than this; use more --workers"
            )
    wears = any(rung.kind in ("disk", "pool") for rung in run.fleet.hardware.rungs)
    if wears and 0 < run.span_s < SECONDS_PER_DAY:
        lines.append(
            f"writes per day are those of {_hours(run.span_s / HOUR_S)} hours, taken for a whole "
            "day: that overstates them where the hours are busy ones, or tiers fill"
        )
    return lines


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _cost(run: Run, tier: int, rung: Rung) -> TierCost:
    medium, site, span_s = rung.medium, run.fleet.hardware.profile.site, run.span_s
    if medium is None:
        return TierCost(rung.kind, 0.0, 0.0, 0.0, 0.0)
    shelves = run.fleet.shelves(tier)
    size = run.fleet.hardware.world.record_bytes
    read, written = run.tier_bytes(tier)
    gb = rung.bytes_bought * len(shelves) / 1e9
    hardware = requests = 0.0
    if medium.dollars_per_gb:
        hardware = gb * medium.dollars_per_gb.mid * span_s / (site.amortised_years.mid * YEAR_S)
    if medium.dollars_per_gb_month:
        kept = sum(shelf.peak for shelf in shelves) * size / 1e9
        hardware += kept * medium.dollars_per_gb_month.mid * span_s / MONTH_S
    for price, blocks in (
        (medium.dollars_per_million_gets, read / size),
        (medium.dollars_per_million_puts, written / size),
    ):
        requests += price.mid * blocks / 1e6 if price else 0.0
    for price, nbytes in ((medium.dollars_per_gb_out, read), (medium.dollars_per_gb_in, written)):
        requests += price.mid * nbytes / 1e9 if price else 0.0
    joules = _joules(run, rung, read + written, len(shelves)) * site.power_overhead.mid
    power = joules / JOULES_PER_KWH * site.dollars_per_kwh.mid
    return TierCost(rung.kind, hardware, power, requests, joules)


def _joules(run: Run, rung: Rung, nbytes: float, owners: int) -> float:
    medium = rung.medium
    if medium is None or medium.active_watts is None:
        return 0.0
    units = rung.units_bought * owners
    idle = medium.idle_watts.mid if medium.idle_watts else 0.0
    moving_s = nbytes / (medium.read_bytes_per_s.mid * units) if units else 0.0
    share = min(1.0, moving_s / run.span_s) if run.span_s else 0.0
    return units * (idle + share * (medium.active_watts.mid - idle)) * run.span_s
