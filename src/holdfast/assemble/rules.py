"""What is written to a disk tier, from its configuration."""

from __future__ import annotations

from holdfast.config import Config, DiskOptions, HostOptions
from holdfast.limits import MIB
from holdfast.policy.admit import Admission, Always, ReusePrediction, SecondTouch, WriteBudget
from holdfast.store.store import Store

_NAMES_MIN = 1 << 16
_NAMES_MAX = 1 << 20


def choose_rules(store: Store, config: Config) -> None:
    """Have each disk tier's rule asked before blocks are written to it."""
    below = [tier for tier in config.tiers if not isinstance(tier, HostOptions)]
    for number, options in enumerate(below, start=1):
        if isinstance(options, DiskOptions):
            rule = admission(options)
            if not isinstance(rule, Always):
                store.states.choose(number, rule)


def admission(options: DiskOptions) -> Admission:
    """Return the rule that a disk tier's options ask for."""
    rule: Admission
    match options.admit:
        case "always":
            rule = Always()
        case "second_touch":
            # About as many names as blocks that the tier has room for.
            rule = SecondTouch(min(max(options.capacity // MIB, _NAMES_MIN), _NAMES_MAX))
        case "reuse":
            rule = ReusePrediction()
    if options.writes_per_day is None:
        return rule
    return WriteBudget(rule, options.writes_per_day * options.capacity)
