"""The rules of a simulated tier, by name: the policies and rules of admission that serve."""

from __future__ import annotations

from holdfast.assemble.rules import admission
from holdfast.config.options import DiskOptions, Size
from holdfast.errors import ConfigError
from holdfast.policy.choice import DEFAULT, POLICIES
from holdfast.sim.fleet import NewRules
from holdfast.sim.hardware import Hardware, Rung
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
        if tier.admit == "always" and tier.writes_per_day is None:
            return Rules(eviction)
        options = DiskOptions(
            path="",
            capacity=Size(rung.nbytes),
            admit=tier.admit,
            writes_per_day=tier.writes_per_day,
        )
        return Rules(eviction, admission(options))

    return made


def _check(policy: str, where: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"{where}: {policy!r} is not known; use one of: {', '.join(POLICIES)}")
