"""What is written to the tiers below memory, and whose the tiers are, from their configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from holdfast.config import Config, CxlOptions, DiskOptions, DomainOptions, HostOptions
from holdfast.limits import MIB
from holdfast.policy.admit import (
    Admission,
    Always,
    PerDomain,
    ReusePrediction,
    SecondTouch,
    WriteBudget,
)
from holdfast.policy.choice import POLICIES
from holdfast.policy.guard import ThrashGuard
from holdfast.policy.reuse_interval import ReuseInterval
from holdfast.policy.shares import UNBOUNDED, Quota
from holdfast.store.store import Store

_NAMES_MIN = 1 << 16
_NAMES_MAX = 1 << 20


def choose_rules(store: Store, config: Config) -> None:
    """Have the rule of each tier of this node's own asked before blocks are written to it."""
    budgets: dict[bytes, Admission] = {}
    for name, domain in config.domains.items():
        if domain.write_budget_bytes_per_day is not None:
            budget = WriteBudget(Always(), domain.write_budget_bytes_per_day)
            budgets[store.domain(name)[1]] = budget
    below = [tier for tier in config.tiers if not isinstance(tier, HostOptions)]
    for number, options in enumerate(below, start=1):
        if isinstance(options, DiskOptions):
            store.states.rules.budgets[number - 1] = budgets
        if isinstance(options, CxlOptions | DiskOptions):
            saved_s = partial(store.judgement.saved_s, number)
            own = budgets if isinstance(options, DiskOptions) else None
            rule = admission(options, own, saved_s)
            if not isinstance(rule, Always):
                store.states.rules.choose(number, rule)


def divide(store: Store, config: Config) -> None:
    """Divide the tiers between domains, if any of them has a quota, a reservation or a share."""
    if not any(domain.divides for domain in config.domains.values()):
        return
    quotas = {name: _quotas(config, domain) for name, domain in config.domains.items()}
    store.divide(quotas, POLICIES[config.policy])


def _quotas(config: Config, domain: DomainOptions) -> dict[int, Quota]:
    """Return what a domain may hold, by the tier's number."""
    return {
        number: Quota(
            int(domain.reserved_bytes.get(name, 0)),
            int(domain.quota_bytes[name]) if name in domain.quota_bytes else UNBOUNDED,
            1.0 if domain.share is None else domain.share,
        )
        for number, name in enumerate(config.tier_names)
    }


def admission(
    options: CxlOptions | DiskOptions,
    budgets: Mapping[bytes, Admission] | None = None,
    saved_s: Callable[[int], float] | None = None,
) -> Admission:
    """Return the rule that a tier's options ask for, within the budgets of single domains.

    `saved_s(nbytes)`: how much sooner so many bytes come from this tier than from the next one.
    """
    rule: Admission
    match options.admit:
        case "always":
            rule = Always()
        case "second_touch":
            # About as many names as blocks that the tier has room for.
            rule = SecondTouch(min(max(options.capacity // MIB, _NAMES_MIN), _NAMES_MAX))
        case "reuse":
            rule = ReusePrediction()
        case "reuse_interval":
            rule = ReuseInterval(options.capacity, saved_s)
    if budgets:
        rule = PerDomain(rule, budgets)
    if isinstance(options, DiskOptions) and options.writes_per_day is not None:
        rule = WriteBudget(rule, options.writes_per_day * options.capacity)
    return ThrashGuard(rule, options.capacity) if options.thrash_guard else rule
