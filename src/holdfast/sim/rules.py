"""Eviction policies and admission rules of simulated tiers: the store's own, chosen by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.assemble.rules import admission
from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.plan.cost import TierEstimate
from holdfast.policy.admit import AlwaysAdmit
from holdfast.policy.choice import DEFAULT, POLICIES
from holdfast.sim.fleet import NewRules
from holdfast.sim.hardware import SimulatedHardware, TierSpec
from holdfast.sim.ladder import TierModel
from holdfast.sim.memory import SimulatedRules
from holdfast.sim.tier_order import KIND_ORDERS, TIER_ORDERS
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.disk.kind import DiskOptions


def rules_of(hardware: SimulatedHardware, policy: str = DEFAULT) -> NewRules:
    """Return a function that creates a tier's rules: by its ladder entry, else as in a node.

    `policy` orders the blocks of tiers that do not evict by themselves. Raises ConfigError for an
    unknown policy.
    """
    _check(policy, "--policy", POLICIES)
    orders = {**POLICIES, **TIER_ORDERS}
    for number, tier_spec in enumerate(hardware.tier_specs):
        if tier_spec.model.policy is not None:
            _check(tier_spec.model.policy, f"{hardware.name}: tiers.{number}.policy", orders)

    def create(tier_spec: TierSpec) -> SimulatedRules:
        tier = tier_spec.model
        order = tier.policy or KIND_ORDERS.get(tier.kind, policy)
        given = _given(tier, "admit", "thrash_guard")
        if tier.kind == "cxl":
            options: CxlOptions | DiskOptions = CxlOptions(capacity=Size(tier_spec.nbytes), **given)
        else:
            given |= _given(tier, "writes_per_day")
            raw_bytes = Size(tier_spec.nbytes * tier_spec.ratio)  # rules count raw blocks
            options = DiskOptions(path="", capacity=raw_bytes, **given)
        # By identity: equal tiers of a ladder compare equal.
        at = next(i for i, one in enumerate(hardware.tier_specs) if one is tier_spec)
        speeds = [
            TierEstimate(one.latency_s, one.read_bytes_per_s)
            for one in hardware.tier_specs[at : at + 2]
        ]

        def saved_s(nbytes: int) -> float:
            """Return the seconds saved by reading this tier, not the one below; both idle."""
            return speeds[1].seconds(nbytes) - speeds[0].seconds(nbytes)

        rule = admission(options, saved_s=saved_s if len(speeds) > 1 else None)
        return SimulatedRules(
            orders[order](),
            None if isinstance(rule, AlwaysAdmit) else rule,
            evicts_by_itself=order in TIER_ORDERS,
        )

    return create


def _given(tier: TierModel, *names: str) -> dict[str, Any]:
    """Return the named options that the ladder file gives; a node's defaults apply to the rest."""
    values = {name: getattr(tier, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _check(policy: str, where: str, known: Iterable[str]) -> None:
    if policy not in known:
        raise ConfigError(f"{where}: {policy!r} is not known; use one of: {', '.join(known)}")
