"""Calibration: fit a ladder file to times measured on a machine, and predict times from it.

`plan.cost` fits prefill, as in a running store. The time of a tier is the time of a warm request
less the prefill of its tail: it covers the whole path from the tier into the engine's pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import BLOCK_TOKENS
from holdfast.plan.cost import (
    HOST_DEFAULT,
    LOWER_DEFAULT,
    PREFILL_HALF_LIFE,
    PREFILL_KEPT,
    PREFILL_OBSERVATIONS_MIN,
    PrefillCost,
    PrefillFit,
    TierEstimate,
)
from holdfast.plan.fit import Belief, OnlineFit
from holdfast.plan.planner import BestCut
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import SimulatedHardware, resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.profile import shipped
from holdfast.sim.route import ROUTERS
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Simulation, SimulationSettings
from holdfast.sim.trace import UNKNOWN, Trace

MISFIT_MAX = 0.25
"""Maximum relative difference between a fit and each of its measured times."""

_APART_S = 10_000.0
"""Interval between the two requests of `first_tokens_s`: the first is done long before."""


def prefill_of(cold: Mapping[int, float], tail: int) -> PrefillCost:
    """Fit the prefill cost to the times of requests without hits.

    `cold` maps context tokens to seconds; each prompt has `tail` more tokens. Raises ConfigError
    for too few lengths, HoldfastError for a poor fit.
    """
    fit = PrefillFit()
    for tokens, seconds in cold.items():
        fit.observe(tokens + tail, 0, seconds)
    cost = fit.cost
    if cost is None:
        raise ConfigError(
            f"{len(cold)} lengths are too few for a fit; "
            f"measure at least {PREFILL_OBSERVATIONS_MIN}"
        )
    for tokens, seconds in cold.items():
        _check_fit(f"{tokens} tokens computed", cost.seconds(tokens + tail), seconds)
    return cost


def tier_of(
    warm: Mapping[int, float], prefill: PrefillCost, token_bytes: float, tail: int
) -> TierEstimate:
    """Fit a tier's latency and bandwidth to the times of requests that fetch all their context.

    The latency has no upper bound, unlike in `plan.cost.TierFit`: it includes the engine's share of
    a warm request, about a hundred times the tier's own latency. If the times do not grow with the
    bytes, because the bytes take little of the time, the bandwidth is that of memory and the rest
    of the time is latency.
    """
    prior = Belief((0.0, 1.0 / LOWER_DEFAULT.bytes_per_s), (1e-6, 0.05))
    fit = OnlineFit(prior, half_life=PREFILL_HALF_LIFE, most=PREFILL_KEPT)
    # The time of a warm request less the prefill of its tail.
    fetches = {n: max(1e-6, seconds - prefill.seconds(tail, n)) for n, seconds in warm.items()}
    for tokens, fetch_s in fetches.items():
        fit.add((1.0, tokens * token_bytes), fetch_s)
    latency_s, per_byte = fit.coefficients()
    if per_byte:
        tier = TierEstimate(latency_s, 1.0 / per_byte)
    else:
        rests = [
            fetch_s - n * token_bytes / HOST_DEFAULT.bytes_per_s for n, fetch_s in fetches.items()
        ]
        tier = TierEstimate(max(0.0, median(rests)), HOST_DEFAULT.bytes_per_s)
    for tokens, seconds in warm.items():
        fitted_s = tier.seconds(tokens * token_bytes) + prefill.seconds(tail, tokens)
        _check_fit(f"{tokens} tokens fetched", fitted_s, seconds)
    return tier


def _check_fit(what: str, fitted_s: float, measured_s: float) -> None:
    """Raise HoldfastError if a fit is far from a measured time: the measurement was disturbed."""
    if abs(fitted_s - measured_s) > MISFIT_MAX * measured_s:
        raise HoldfastError(
            f"{what}: {measured_s:.3f} s measured, {fitted_s:.3f} s by the fit to all lengths: "
            f"over {MISFIT_MAX:.0%} apart; nothing is written: let the machine rest, or raise "
            "--rounds"
        )


def ladder_data(
    prefill: PrefillCost,
    tiers: Mapping[str, TierEstimate],
    token_bytes: float,
    capacities: Mapping[str, int],
) -> dict[str, Any]:
    """Return the ladder file of a machine as plain data for YAML."""
    return {
        "token_bytes": token_bytes,
        "engine": {"prefill": {"a": prefill.a, "b": prefill.b, "c": prefill.c}},
        "tiers": [
            {
                "kind": kind,
                "capacity": capacities[kind],
                "latency_s": estimate.latency_s,
                "read_bytes_per_s": estimate.bytes_per_s,
            }
            for kind, estimate in tiers.items()
        ],
    }


def predict(data: Mapping[str, Any], tier: str, tokens: int, tail: int) -> list[float]:
    """Simulate one context twice with one tier of a ladder; return both times to first token.

    The context has `tokens` tokens, a whole number of blocks of `BLOCK_TOKENS`; each prompt has
    `tail` more. The first request computes everything, the second fetches the context.
    """
    ladder = parse_ladder(dict(data), "calibrated")
    tiers = [each for each in ladder.tiers if each.kind == tier]
    ladder = msgspec.structs.replace(ladder, tiers=tiers)
    return first_tokens_s(resolve(ladder, shipped(), BLOCK_TOKENS), tokens, tail)


def first_tokens_s(hardware: SimulatedHardware, tokens: int, tail: int = 0) -> list[float]:
    """Simulate one prompt twice on one worker; return both times to first token.

    The prompt has `tokens` tokens, a whole number of blocks, and `tail` more in no full block.
    """
    block_tokens = hardware.namespace.block_tokens
    blocks = tokens // block_tokens
    ids = np.arange(blocks, dtype=np.int32)
    trace = Trace(
        name="twice",
        block_tokens=block_tokens,
        time_s=np.array([0.0, _APART_S]),
        input_tokens=np.full(2, tokens + tail, np.int64),
        output_tokens=np.zeros(2, np.int64),
        session=np.full(2, UNKNOWN, np.int32),
        think_s=np.full(2, np.nan),
        starts=np.array([0, blocks, 2 * blocks], np.int64),
        ids=np.concatenate([ids, ids]),
    )
    fleet = Fleet(hardware, 1, rules_of(hardware))
    settings = SimulationSettings(BestCut(), ROUTERS["round_robin"])
    requests = Simulation(trace, fleet, settings).run()
    return [float(first) for first in requests.first_s - requests.arrived_s]
