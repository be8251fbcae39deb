"""Cost and energy of a simulated fleet: dollars per million output tokens, and kWh.

GPUs cost their hourly price for the seconds in which they work; the price covers their memory and
power. Work that exceeds the run's time counts too, and `assumptions` then says so. All other media
are bought in whole units and written off over the profile's years. They draw idle power, and up to
active power in proportion to the time in which they move bytes. Object stores cost by the bytes
stored and by request (`holdfast.sim.paid_requests`).
"""

from __future__ import annotations

from holdfast.report import Row
from holdfast.sim.amounts import HOURS_PER_YEAR, SECONDS_PER_DAY
from holdfast.sim.evidence import trace_notes
from holdfast.sim.figures import SimulationFigures
from holdfast.sim.paid_requests import paid_requests
from holdfast.sim.trace import share

HOUR_S = 3_600.0
YEAR_S = HOURS_PER_YEAR * HOUR_S
MONTH_S = YEAR_S / 12
JOULES_PER_KWH = 3.6e6


def economy_figures(run: SimulationFigures) -> list[Row]:
    """Return dollars per million output tokens with and without the ladder, and the energy."""
    gpu, gpus, out = run.fleet.hardware.gpu, run.fleet.hardware.gpus, run.output_tokens
    if gpu is None or not out:
        return []
    hourly, site = gpu.dollars_per_hour.mid, run.fleet.hardware.profile.site
    per_s = gpus * hourly / HOUR_S
    worked_s = run.prefill_s + run.decode_s
    bare_s = worked_s + float(run.requests.saved_s.sum())
    span_s = run.span_s
    tier_dollars = tier_joules = 0.0  # of all workers
    costs: dict[str, float] = {}
    for tier, tier_spec in enumerate(run.fleet.hardware.tier_specs):
        medium = tier_spec.medium
        if medium is None or tier_spec.kind == "device":
            continue
        tier_states = run.fleet.tier_states(tier)
        read, written = run.tier_bytes(tier)
        gb = tier_spec.bytes_bought * len(tier_states) / 1e9
        hardware = gb * medium.dollars_per_gb.mid * span_s / (site.amortised_years.mid * YEAR_S)
        stored_gb = sum(state.peak for state in tier_states) * run.stored_block_bytes(tier) / 1e9
        rented_gb = gb if medium.unit_bytes else stored_gb
        hardware += rented_gb * medium.dollars_per_gb_month.mid * span_s / MONTH_S
        calls = paid_requests(read, written, len(run.fleet.workers), span_s)
        requests = calls.dollars(medium, lambda figure: figure.mid)
        requests += medium.dollars_per_gb_out.mid * read / 1e9
        requests += medium.dollars_per_gb_in.mid * written / 1e9
        units = tier_spec.units_bought * len(tier_states)
        watts = medium.watts(units, share(read + written, span_s)) * site.power_overhead.mid
        joules = watts * span_s
        dollars = hardware + joules / JOULES_PER_KWH * site.dollars_per_kwh.mid + requests
        name = f"{tier_spec.kind}_dollars"  # a ladder may have two tiers of one kind
        costs[name] = costs.get(name, 0.0) + dollars
        tier_dollars += dollars
        tier_joules += joules
    with_ladder = (worked_s * per_s + tier_dollars) / out * 1e6
    without = bare_s * per_s / out * 1e6
    gpu_watts = gpus * gpu.watts.mid * site.power_overhead.mid
    paid: dict[str, object] = {"gpu_dollars": worked_s * per_s, **costs}
    spared: dict[str, object] = {"spared_kwh": gpu_watts * (bare_s - worked_s) / JOULES_PER_KWH}
    return [
        Row("sim.cost.per_million_out", with_ladder, "$", paid),
        Row("sim.cost.without_ladder", without, "$", {"gpu_dollars": bare_s * per_s}),
        Row("sim.cost.gain", without / with_ladder - 1 if with_ladder else None, "share"),
        Row("sim.energy.gpu", gpu_watts * worked_s / JOULES_PER_KWH, "kWh", spared),
        Row("sim.energy.tiers", tier_joules / JOULES_PER_KWH, "kWh"),
    ]


def assumptions(run: SimulationFigures) -> list[str]:
    """Return the assumptions behind the figures and their limitations, one per line."""
    hardware, engine = run.fleet.hardware, run.fleet.hardware.engine
    cost, site = hardware.prefill, hardware.profile.site
    namespace = hardware.namespace
    token_bytes = namespace.raw_bytes / namespace.block_tokens
    formula = f"{cost.a:.3g} + {cost.b:.3g} n + {cost.c:.3g} n (m + n/2) s"
    rate = f"{engine.decode_tokens_per_s:g} tokens/s for each of {engine.decodes_at_once} requests"
    lines = [
        f"{token_bytes:,.0f} bytes of KV state per token, {namespace.block_tokens} tokens a block",
        f"prefill of n tokens after m: {formula}, {engine.prefills_at_once} at a time",
        f"decoding: {rate} at once; it does not slow prefill",
        *_codec_lines(run),
        "only the KV state of input is saved; that of an answer is saved when it is input again",
    ]
    if hardware.gpu:
        lines.append(
            f"prices of {hardware.profile.date}: GPU ${hardware.gpu.dollars_per_hour.mid:g}/h "
            f"while it works, tiers written off in {site.amortised_years.mid:g} years, "
            f"${site.dollars_per_kwh.mid:g}/kWh, power overhead {site.power_overhead.mid:g}"
        )
    needs = [("", run.busy, run.span_s), ("without the ladder, ", run.bare_busy, run.bare_span_s)]
    for which, busy, span_s in needs:
        if busy > 1:
            available = len(run.fleet.workers) * hardware.gpus * span_s / HOUR_S
            lines.append(
                f"{which}prefill and decoding need {busy:.2f} of the engines there are, "
                f"{_hours(busy * available)} GPU hours of {_hours(available)}: dollars and energy "
                "are for the hours needed, and answers would be later than simulated; use more "
                "--workers"
            )
    wears = any(tier_spec.kind in ("disk", "pool") for tier_spec in hardware.tier_specs)
    if wears and 0 < run.span_s < SECONDS_PER_DAY:
        lines.append(
            f"writes per day are extrapolated from {_hours(run.span_s / HOUR_S)} hours, which "
            "overstates them if these are busy hours or tiers still fill"
        )
    return [*lines, *trace_notes(run.trace)]


def _codec_lines(run: SimulationFigures) -> list[str]:
    """Return which tiers store encoded records, and at which ratio; nothing if none does."""
    hardware = run.fleet.hardware
    encoded = [spec for spec in hardware.tier_specs if spec.ratio != 1]
    if not encoded:
        return []
    names, figures = ", ".join(spec.kind for spec in encoded), hardware.profile.codec
    return [
        (
            f"{names}: records take 1/{encoded[0].ratio:g} of their raw bytes (lossless codec), "
            f"{figures.decode_threads.mid:g} threads decode "
            f"{figures.decode_bytes_per_s.mid / 1e9:g} GB/s each; GB are stored bytes; "
            "`codec: off` in the ladder counts without"
        )
    ]


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"
