"""The rules of a simulated tier, by name: the policies and rules of admission that serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.assemble.rules import admission
from holdfast.config.options import CxlOptions, DiskOptions, Size
from holdfast.errors import ConfigError
from holdfast.plan.cost import TierEstimate
from holdfast.policy.admit import Always
from holdfast.policy.choice import DEFAULT, POLICIES
from holdfast.sim.fleet import NewRules
from holdfast.sim.hardware import Hardware, Rung
from holdfast.sim.ladder import TierModel
from holdfast.sim.memory import Rules


def rules_of(hardware: Hardware, policy: str = DEFAULT) -> NewRules:
    """Return what makes the rules of each tier: its own where it says so, else `policy`.

    Raises ConfigError for a policy that is not known.
    """
    _check(policy, "--policy")
    for number, rung in enumerate(hardware.rungs):
        if rung.model.policy is not None:
            _check(rung.model.policy, f"{hardware.name}: tiers.{number}.policy")

    def made(rung: Rung) -> Rules:
        tier = rung.model
        eviction = POLICIES[tier.policy or policy]()
        said = _said(tier, "admit", "thrash_guard")
        if tier.kind == "cxl":
            options: CxlOptions | DiskOptions = CxlOptions(capacity=Size(rung.nbytes), **said)
        else:
            said |= _said(tier, "writes_per_day")
            options = DiskOptions(path="", capacity=Size(rung.nbytes), **said)
        rule = admission(options, saved_s=_saved_s(hardware, rung))
        return Rules(eviction, None if isinstance(rule, Always) else rule)

    return made


def _said(tier: TierModel, *names: str) -> dict[str, Any]:
    """Return what the ladder file says of these; of the rest a node's defaults hold."""
    said = {name: getattr(tier, name) for name in names}
    return {name: value for name, value in said.items() if value is not None}


def _saved_s(hardware: Hardware, rung: Rung) -> Callable[[int], float] | None:
    """Return how much sooner bytes come from a tier than from the one below, both at rest."""
    at = hardware.rungs.index(rung)
    if at + 1 == len(hardware.rungs):
        return None
    here, there = (
        TierEstimate(one.latency_s, one.read_bytes_per_s) for one in hardware.rungs[at : at + 2]
    )
    return lambda nbytes: there.seconds(nbytes) - here.seconds(nbytes)


def _check(policy: str, where: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"{where}: {policy!r} is not known; use one of: {', '.join(POLICIES)}")
