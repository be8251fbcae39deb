"""From what was measured on a machine to the ladder that stands for it, and back to predictions.

Prefill is fitted by the code that a running store fits it with (`plan.cost`). What a tier brings is
what is left of a warm request's time when the computing of its tail is taken off: it covers the
whole way from the tier into the engine's pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import msgspec
import numpy as np

from holdfast.errors import ConfigError, HoldfastError
from holdfast.plan.cost import (
    HOST_DEFAULT,
    LOWER_DEFAULT,
    PREFILL_HALF_LIFE,
    PREFILL_KEPT,
    PrefillCost,
    PrefillFit,
    TierEstimate,
)
from holdfast.plan.fit import Belief, Fit
from holdfast.plan.planner import BestCut
from holdfast.sim.fleet import Fleet
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import Ladder, parse_ladder
from holdfast.sim.profile import load_profile
from holdfast.sim.route import router
from holdfast.sim.rules import rules_of
from holdfast.sim.run import Setting, Simulation
from holdfast.sim.trace import Trace

POINTS_MIN = 3
"""Lengths that a fit needs."""

MISFIT = 0.25
"""How far a fit may be from any of the times it was made from."""

_APART_S = 10_000.0


def prefill_of(cold: Mapping[int, float], tail: int) -> PrefillCost:
    """Fit the cost of prefill to times of contexts computed whole, `tail` tokens behind each."""
    if len(cold) < POINTS_MIN:
        raise ConfigError(f"{len(cold)} lengths are too few for a fit; measure {POINTS_MIN}")
    fit = PrefillFit()
    for tokens, seconds in cold.items():
        fit.observe(tokens + tail, 0, seconds)
    cost = fit.cost
    if cost is None:
        raise ConfigError("the times measured make no cost of prefill; measure again")
    for tokens, seconds in cold.items():
        _check_fit(f"{tokens} tokens computed", cost.seconds(tokens + tail), seconds)
    return cost


def tier_of(
    warm: Mapping[int, float], prefill: PrefillCost, token_bytes: float, tail: int
) -> TierEstimate:
    """Fit a tier to times of contexts fetched whole from it.

    Its latency is whatever the times say: the engine's own share of a warm request is in it, a
    hundred times what a tier needs to its first byte, which `plan.cost.TierFit` is held to. Where
    the times do not grow with the bytes, as these are few beside the rest, the bytes are taken to
    come as fast as memory gives them, and all else is latency.
    """
    if len(warm) < POINTS_MIN:
        raise ConfigError(f"{len(warm)} lengths are too few for a fit; measure {POINTS_MIN}")
    believed = Belief((0.0, 1.0 / LOWER_DEFAULT.bytes_per_s), (1e-6, 0.05))
    fit = Fit(believed, half_life=PREFILL_HALF_LIFE, most=PREFILL_KEPT)
    for tokens, seconds in warm.items():
        fit.observe((1.0, tokens * token_bytes), _left_s(tokens, seconds, prefill, tail))
    latency_s, per_byte = fit.coefficients()
    if per_byte:
        tier = TierEstimate(latency_s, 1.0 / per_byte)
    else:
        rests = [
            _left_s(n, s, prefill, tail) - n * token_bytes / HOST_DEFAULT.bytes_per_s
            for n, s in warm.items()
        ]
        tier = TierEstimate(max(0.0, median(rests)), HOST_DEFAULT.bytes_per_s)
    for tokens, seconds in warm.items():
        said_s = tier.seconds(tokens * token_bytes) + prefill.seconds(tail, tokens)
        _check_fit(f"{tokens} tokens fetched", said_s, seconds)
    return tier


def _left_s(tokens: int, seconds: float, prefill: PrefillCost, tail: int) -> float:
    return max(1e-6, seconds - prefill.seconds(tail, tokens))


def _check_fit(what: str, said_s: float, measured_s: float) -> None:
    """Refuse a fit that is far from what it was made from: something disturbed a length."""
    if abs(said_s - measured_s) > MISFIT * measured_s:
        raise HoldfastError(
            f"{what}: {measured_s:.3f} s measured, {said_s:.3f} s by the fit to all lengths, more "
            f"than {MISFIT:.0%} apart; nothing is written: let the machine rest, or raise --rounds"
        )


def ladder_data(
    prefill: PrefillCost,
    tiers: Mapping[str, TierEstimate],
    token_bytes: float,
    capacities: Mapping[str, int],
) -> dict[str, Any]:
    """Return the ladder file of a machine as plain data, fit for YAML."""
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


def predict(data: Mapping[str, Any], tier: str, tokens: int, tail: int, block: int) -> list[float]:
    """Simulate one context twice, with this tier only: the first tokens' times, cold and warm.

    `tokens` of the context, a whole number of blocks of `block`; `tail` more behind it.
    """
    ladder = parse_ladder(dict(data), "calibrated")
    ladder = _only(ladder, tier)
    trace = _twice(tokens, tail, block)
    hardware = resolve(ladder, load_profile(""), block)
    fleet = Fleet(hardware, 1, rules_of(hardware))
    requests = Simulation(trace, fleet, Setting(BestCut(), router("round_robin"))).run()
    return [float(first) for first in requests.first_s - requests.arrived_s]


def _only(ladder: Ladder, tier: str) -> Ladder:
    kept = [each for each in ladder.tiers if each.kind == tier]
    return msgspec.structs.replace(ladder, tiers=kept)


def _twice(tokens: int, tail: int, block: int) -> Trace:
    blocks = tokens // block
    ids = np.arange(blocks, dtype=np.int32)
    return Trace(
        name="twice",
        block_tokens=block,
        time_s=np.array([0.0, _APART_S]),
        input_tokens=np.full(2, tokens + tail, np.int64),
        output_tokens=np.zeros(2, np.int64),
        session=np.zeros(2, np.int32),
        think_s=np.full(2, np.nan),
        starts=np.array([0, blocks, 2 * blocks], np.int64),
        ids=np.concatenate([ids, ids]),
    )
