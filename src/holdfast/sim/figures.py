"""What a simulation found, as named figures: hits, times, bytes, wear."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.sim.fleet import Fleet
from holdfast.sim.formulas import SECONDS_PER_DAY
from holdfast.sim.served import Served
from holdfast.sim.trace import Floats, Longs, Trace


class Figure(msgspec.Struct, frozen=True):
    """One figure; `more` holds what only this kind of figure has."""

    what: str
    value: float | None
    unit: str
    more: dict[str, object] = {}


class Run(NamedTuple):
    """A trace, the fleet it went through, and what became of each request.

    `bare`: what became of them on the same engines without any tier, all of it computed.
    """

    trace: Trace
    fleet: Fleet
    requests: Served
    bare: Served

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the end of the last answer."""
        return self._end_s(self.requests)

    @property
    def bare_span_s(self) -> float:
        """The same of the engines without any tier."""
        return self._end_s(self.bare)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return int(self.trace.output_tokens.sum())

    @property
    def prefill_s(self) -> float:
        """Seconds that engines spent on prefill."""
        return sum(worker.engine.busy_s for worker in self.fleet.workers)

    @property
    def decode_s(self) -> float:
        """Seconds of whole engines that decoding took: requests share them."""
        engine = self.fleet.hardware.engine
        return self.output_tokens / (engine.decode_tokens_per_s * engine.decodes_at_once)

    @property
    def busy(self) -> float:
        """Engines that prefill and decoding need together, over those there are.

        Decoding does not slow prefill here, so it may be above 1: more work than the run has time.
        """
        return _share(self.prefill_s + self.decode_s, len(self.fleet.workers) * self.span_s)

    @property
    def bare_busy(self) -> float:
        """The same without any tier: what was fetched is computed too."""
        computed_s = self.prefill_s + float(self.requests.saved_s.sum())
        return _share(computed_s + self.decode_s, len(self.fleet.workers) * self.bare_span_s)

    def _end_s(self, served: Served) -> float:
        rate = self.fleet.hardware.engine.decode_tokens_per_s
        return float((served.first_s + self.trace.output_tokens / rate).max(initial=0.0))

    def tier_bytes(self, tier: int) -> tuple[float, float]:
        """Bytes read from and written to one tier of the ladder, by all workers."""
        size = self.fleet.hardware.world.record_bytes
        read = float(self.requests.fetched[:, tier].sum()) * size
        if self.fleet.names[tier] == "device":  # the engine computes on it where it lies
            read = 0.0
        return read, float(sum(shelf.written for shelf in self.fleet.shelves(tier))) * size


def hit_figures(run: Run) -> list[Figure]:
    """Hits as shares of input tokens and of block accesses, and the tiers they came from."""
    trace, found = run.trace, run.requests
    inputs = int(trace.input_tokens.sum())
    reached = np.cumsum(found.fetched, axis=1)
    tokens = np.minimum(reached * trace.block_tokens, trace.input_tokens[:, None])
    by_tier: Longs = np.diff(tokens, axis=1, prepend=0).sum(axis=0)
    held = np.minimum(found.held * trace.block_tokens, trace.input_tokens)
    figures = [
        Figure("sim.hit.tokens", _share(int(tokens[:, -1].sum()), inputs), "share"),
        Figure("sim.hit.blocks", _share(int(found.fetched.sum()), trace.blocks), "share"),
        Figure("sim.held.tokens", _share(int(held.sum()), inputs), "share"),
    ]
    for tier, name in enumerate(run.fleet.names):
        shelves = run.fleet.shelves(tier)
        read, written = run.tier_bytes(tier)
        more: dict[str, object] = {
            "blocks": int(found.fetched[:, tier].sum()),
            "read_gb": read / 1e9,
            "written_gb": written / 1e9,
            "capacity_blocks": sum(shelf.capacity for shelf in shelves),
            "peak_blocks": sum(shelf.peak for shelf in shelves),
            "refused_blocks": sum(shelf.refused for shelf in shelves),
            "declined_blocks": sum(shelf.declined for shelf in shelves),
        }
        share = _share(int(by_tier[tier]), inputs)
        figures.append(Figure(f"sim.tier.{tier}.{name}", share, "share", more))
    return figures


def time_figures(run: Run) -> list[Figure]:
    """Time to the first token and what it consists of, and what the engines were spared."""
    found, gpus = run.requests, run.fleet.hardware.gpus
    ttft = found.first_s - found.arrived_s
    parts: dict[str, object] = {
        "line_s": _mean(found.looked_s - found.arrived_s),
        "fetch_s": _mean(found.fetched_s - found.looked_s),
        "queue_s": _mean(found.started_s - found.fetched_s),
        "compute_s": _mean(found.first_s - found.started_s),
    }
    bare = run.bare.first_s - run.bare.arrived_s
    figures = []
    for percent in (50, 90, 99):
        without = _percentile(bare, percent)
        value = _percentile(ttft, percent)
        figures.append(Figure(f"sim.ttft.p{percent}", value, "s", {"without_ladder_s": without}))
    figures.append(Figure("sim.ttft.mean", _mean(ttft), "s", parts))
    saved = float(found.saved_s.sum())
    there_s = len(run.fleet.workers) * run.span_s
    parts_busy: dict[str, object] = {
        "workers": len(run.fleet.workers),
        "prefill": _share(run.prefill_s, there_s),
        "decode": _share(run.decode_s, there_s),
        "without_ladder": run.bare_busy,
    }
    return [
        *figures,
        Figure("sim.gpu.prefill", run.prefill_s * gpus, "GPU s"),
        Figure(
            "sim.gpu.saved", saved * gpus, "GPU s", {"share": _share(saved, saved + run.prefill_s)}
        ),
        Figure("sim.gpu.decode", run.decode_s * gpus, "GPU s"),
        Figure("sim.gpu.busy", run.busy, "of the engines there are", parts_busy),
        Figure("sim.late", float(found.late.sum()), "requests"),
        Figure("sim.requests", float(run.trace.requests), "requests", {"span_s": run.span_s}),
    ]


def wear_figures(run: Run) -> list[Figure]:
    """Writes per day of every tier that wears, beside what its medium is rated for.

    Of whole drives, as they are bought and rated; a tier's `capacity` may be a part of them.
    """
    figures = []
    for tier, rung in enumerate(run.fleet.hardware.rungs):
        rated = rung.medium.drive_writes_per_day if rung.medium else None
        written = run.tier_bytes(tier)[1]
        if rung.kind not in ("disk", "pool") or not run.span_s:
            continue
        owners = len(run.fleet.shelves(tier))
        per_day = written / run.span_s * SECONDS_PER_DAY
        more: dict[str, object] = {
            "tb_per_day": per_day / 1e12,
            "of_capacity": per_day / (rung.nbytes * owners),
            "measured_s": run.span_s,
        }
        if rated:
            more |= {"rated": rated.mid, "drives_worth": rung.units_bought * owners}
        what = f"sim.writes_per_day.{tier}.{rung.kind}"
        unit = "of the drives bought" if rung.units_bought else "of its capacity"
        figures.append(Figure(what, per_day / (rung.bytes_bought * owners), unit, more))
    return figures


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percentile(values: Floats, percent: int) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0
