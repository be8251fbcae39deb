"""The results of a simulation as named figures: hits, times, bytes, wear."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.report import Row
from holdfast.sim.amounts import SECONDS_PER_DAY
from holdfast.sim.fleet import Fleet
from holdfast.sim.paid_requests import paid_requests
from holdfast.sim.served import ServedRequests
from holdfast.sim.statistics import mean
from holdfast.sim.trace import Longs, Trace, share


class SimulationFigures(NamedTuple):
    """A trace, its fleet, the result for each request, and quantities derived from them.

    `bare` is the result with the same engines and no tiers: every token is computed.
    """

    trace: Trace
    fleet: Fleet
    requests: ServedRequests
    bare: ServedRequests

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the end of the last answer."""
        return self._end_s(self.requests)

    @property
    def bare_span_s(self) -> float:
        """The same with no tiers."""
        return self._end_s(self.bare)

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return int(self.trace.output_tokens.sum())

    @property
    def prefill_s(self) -> float:
        """Seconds that engines spent on prefill."""
        return sum(worker.engine.busy_s for worker in self.fleet.workers)

    @property
    def decode_s(self) -> float:
        """Engine seconds of decoding; concurrent requests share an engine."""
        engine = self.fleet.hardware.engine
        return self.output_tokens / (engine.decode_tokens_per_s * engine.decodes_at_once)

    @property
    def busy(self) -> float:
        """Engines that prefill and decoding need, divided by the engines there are.

        Decoding does not slow prefill in the simulation, so this can exceed 1.
        """
        return share(self.prefill_s + self.decode_s, len(self.fleet.workers) * self.span_s)

    @property
    def bare_busy(self) -> float:
        """The same with no tiers: fetched tokens are computed too."""
        computed_s = self.prefill_s + float(self.requests.saved_s.sum())
        return share(computed_s + self.decode_s, len(self.fleet.workers) * self.bare_span_s)

    def _end_s(self, served: ServedRequests) -> float:
        rate = self.fleet.hardware.engine.decode_tokens_per_s
        return float((served.first_s + self.trace.output_tokens / rate).max(initial=0.0))

    def stored_block_bytes(self, tier: int) -> float:
        """Return the stored bytes of one block on a tier."""
        hardware = self.fleet.hardware
        return hardware.namespace.slot_bytes / hardware.tier_specs[tier].ratio

    def tier_bytes(self, tier: int) -> tuple[float, float]:
        """Return the stored bytes read from and written to one tier, by all workers."""
        size = self.stored_block_bytes(tier)
        read = float(self.requests.fetched[:, tier].sum()) * size
        if self.fleet.names[tier] == "device":  # the engine uses the blocks in place
            read = 0.0
        return read, float(
            sum(tier_state.written for tier_state in self.fleet.tier_states(tier))
        ) * size


def hit_figures(run: SimulationFigures) -> list[Row]:
    """Return the hits as shares of input tokens and block accesses, in total and by tier."""
    trace, found = run.trace, run.requests
    inputs = int(trace.input_tokens.sum())
    reached = np.cumsum(found.fetched, axis=1)
    tokens = np.minimum(reached * trace.block_tokens, trace.input_tokens[:, None])
    by_tier: Longs = np.diff(tokens, axis=1, prepend=0).sum(axis=0)
    held = np.minimum(found.held * trace.block_tokens, trace.input_tokens)
    figures = [
        Row("sim.hit.tokens", share(int(tokens[:, -1].sum()), inputs), "share"),
        Row("sim.hit.blocks", share(int(found.fetched.sum()), trace.blocks), "share"),
        Row("sim.held.tokens", share(int(held.sum()), inputs), "share"),
    ]
    for tier, name in enumerate(run.fleet.names):
        tier_states = run.fleet.tier_states(tier)
        read, written = run.tier_bytes(tier)
        peak = sum(tier_state.peak for tier_state in tier_states)
        more: dict[str, object] = {
            "blocks": int(found.fetched[:, tier].sum()),
            "read_gb": read / 1e9,
            "written_gb": written / 1e9,
            "demoted_blocks": sum(tier_state.demoted for tier_state in tier_states),
            "capacity_blocks": sum(tier_state.capacity for tier_state in tier_states),
            "peak_blocks": peak,
            "peak_bytes": peak * run.stored_block_bytes(tier),
            "codec_ratio": run.fleet.hardware.tier_specs[tier].ratio,
            "refused_blocks": sum(tier_state.refused for tier_state in tier_states),
            "declined_blocks": sum(tier_state.declined for tier_state in tier_states),
        }
        hit = share(int(by_tier[tier]), inputs)
        figures.append(Row(f"sim.tier.{tier}.{name}", hit, "share", more))
    return figures


def time_figures(run: SimulationFigures) -> list[Row]:
    """Return time to first token with its parts, and the GPU seconds used and saved."""
    found, gpus = run.requests, run.fleet.hardware.gpus
    ttft = found.first_s - found.arrived_s
    parts: dict[str, object] = {
        "line_s": mean(found.looked_s - found.arrived_s),
        "fetch_s": mean(found.fetched_s - found.looked_s),
        "queue_s": mean(found.started_s - found.fetched_s),
        "compute_s": mean(found.first_s - found.started_s),
    }
    bare = run.bare.first_s - run.bare.arrived_s
    figures = []
    for percent in (50, 90, 99):
        value, without = (
            float(np.percentile(each, percent)) if len(each) else None for each in (ttft, bare)
        )
        figures.append(Row(f"sim.ttft.p{percent}", value, "s", {"without_ladder_s": without}))
    figures.append(Row("sim.ttft.mean", mean(ttft), "s", parts))
    saved = float(found.saved_s.sum())
    available_s = len(run.fleet.workers) * run.span_s
    parts_busy: dict[str, object] = {
        "workers": len(run.fleet.workers),
        "prefill": share(run.prefill_s, available_s),
        "decode": share(run.decode_s, available_s),
        "without_ladder": run.bare_busy,
    }
    return [
        *figures,
        Row("sim.gpu.prefill", run.prefill_s * gpus, "GPU s"),
        Row("sim.gpu.saved", saved * gpus, "GPU s", {"share": share(saved, saved + run.prefill_s)}),
        Row("sim.gpu.decode", run.decode_s * gpus, "GPU s"),
        Row("sim.gpu.busy", run.busy, "of the engines there are", parts_busy),
        Row("sim.late", float(found.late.sum()), "requests"),
        Row("sim.requests", float(run.trace.requests), "requests", {"span_s": run.span_s}),
    ]


def paid_request_figures(run: SimulationFigures) -> list[Row]:
    """Return the requests to each tier whose medium is paid by them, and their price."""
    figures = []
    for tier, tier_spec in enumerate(run.fleet.hardware.tier_specs):
        medium = tier_spec.medium
        calls = paid_requests(*run.tier_bytes(tier), len(run.fleet.workers), run.span_s)
        dollars = calls.dollars(medium, lambda figure: figure.mid) if medium else 0.0
        if dollars:
            more: dict[str, object] = calls._asdict()
            figures.append(Row(f"sim.paid_requests.{tier}.{tier_spec.kind}", dollars, "$", more))
    return figures


def wear_figures(run: SimulationFigures) -> list[Row]:
    """Return the writes per day of every tier that wears, and the rating of its medium.

    They are relative to the whole drives bought; a tier's `capacity` may be a part of those.
    """
    figures = []
    for tier, tier_spec in enumerate(run.fleet.hardware.tier_specs):
        rated = tier_spec.medium.drive_writes_per_day if tier_spec.medium else None
        written = run.tier_bytes(tier)[1]
        if tier_spec.kind not in ("disk", "pool") or not run.span_s:
            continue
        owners = len(run.fleet.tier_states(tier))
        per_day = written / run.span_s * SECONDS_PER_DAY
        more: dict[str, object] = {
            "tb_per_day": per_day / 1e12,
            "of_capacity": per_day / (tier_spec.nbytes * owners),
            "measured_s": run.span_s,
        }
        if rated:
            more |= {"rated": rated.mid, "drives_worth": tier_spec.units_bought * owners}
        what = f"sim.writes_per_day.{tier}.{tier_spec.kind}"
        unit = "of the drives bought" if tier_spec.units_bought else "of its capacity"
        figures.append(Row(what, per_day / (tier_spec.bytes_bought * owners), unit, more))
    return figures
