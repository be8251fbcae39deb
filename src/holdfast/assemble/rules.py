"""Admission rules of the tiers, and quotas of the domains, from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from holdfast.blocks.namespace import domain_id
from holdfast.config import Config, CxlOptions, DiskOptions, HostOptions
from holdfast.fairness.shares import UNBOUNDED, Quota
from holdfast.limits import MIB
from holdfast.policy.admit import (
    Admission,
    AlwaysAdmit,
    PerDomain,
    ReusePrediction,
    SecondTouch,
    WriteBudget,
)
from holdfast.policy.guard import ThrashGuard
from holdfast.policy.movement import Intake
from holdfast.policy.reuse_interval import ReuseInterval
from holdfast.store.options import TierRules
from holdfast.tiers.kind import LowerTierSection, RecordTierSection, TierSection

_REMEMBERED_KEYS_MIN = 1 << 16
_REMEMBERED_KEYS_MAX = 1 << 20
"""Bounds on the keys that the `second_touch` rule remembers."""


def tier_rules(config: Config, keys: Mapping[str, bytes]) -> dict[int, TierRules]:
    """Return the rules of each tier below the host, by tier number."""
    budgets: dict[bytes, Admission] = {}
    for name, domain in config.domains.items():
        if domain.write_budget_bytes_per_day is not None:
            budget = WriteBudget(AlwaysAdmit(), domain.write_budget_bytes_per_day)
            budgets[domain_id(keys[name])] = budget
    below = [tier for tier in config.tiers if not isinstance(tier, HostOptions)]
    rules = {}
    for number, options in enumerate(below, start=1):
        chosen = TierRules(
            intake=intake(options, config.write),
            codec=options.codec if isinstance(options, RecordTierSection) else "off",
        )
        if (limit := getattr(options, "move_limit", None)) is not None:
            chosen = replace(chosen, move_bytes_per_s=limit)
        if isinstance(options, CxlOptions | DiskOptions):
            own = budgets if isinstance(options, DiskOptions) else {}
            make_rule = partial(admission, options, own)
            chosen = replace(chosen, make_rule=make_rule, budgets=own)
        rules[number] = chosen
    return rules


def intake(options: TierSection, node_write: str) -> Intake:
    """Return what a tier takes, by its options, beside computed blocks.

    `node_write`: the node's option `write`, for tiers that have none of their own.
    """
    if not isinstance(options, LowerTierSection):
        return Intake(saves=node_write == "behind")
    saves = (options.write or node_write) == "behind"
    return Intake(saves, options.admit_evicted, options.admit_fetched)


def quotas(config: Config) -> dict[str, dict[int, Quota]] | None:
    """Return the domains' quotas by name and tier number; None if no domain divides a tier."""
    if not any(domain.divides for domain in config.domains.values()):
        return None
    by_domain: dict[str, dict[int, Quota]] = {}
    for domain_name, domain in config.domains.items():
        by_domain[domain_name] = {
            number: Quota(
                int(domain.reserved_bytes.get(name, 0)),
                int(domain.quota_bytes[name]) if name in domain.quota_bytes else UNBOUNDED,
                1.0 if domain.share is None else domain.share,
            )
            for number, name in enumerate(config.tier_names)
        }
    return by_domain


def admission(
    options: CxlOptions | DiskOptions,
    budgets: Mapping[bytes, Admission] | None = None,
    saved_s: Callable[[int], float] | None = None,
) -> Admission:
    """Return the admission rule that a tier's options select.

    `budgets`: write budgets of single domains. `saved_s(nbytes)`: seconds that a read of `nbytes`
    saves on this tier compared with the next lower one.
    """
    rule: Admission
    match options.admit:
        case "always":
            rule = AlwaysAdmit()
        case "second_touch":
            # About one key per block of the tier's capacity.
            keys = min(max(options.capacity // MIB, _REMEMBERED_KEYS_MIN), _REMEMBERED_KEYS_MAX)
            rule = SecondTouch(keys)
        case "reuse":
            rule = ReusePrediction()
        case "reuse_interval":
            rule = ReuseInterval(options.capacity, saved_s)
    if budgets:
        rule = PerDomain(rule, budgets)
    if isinstance(options, DiskOptions) and options.writes_per_day is not None:
        rule = WriteBudget(rule, options.writes_per_day * options.capacity)
    return ThrashGuard(rule, options.capacity) if options.thrash_guard else rule
