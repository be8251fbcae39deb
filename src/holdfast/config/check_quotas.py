"""Validate the limits of domains: quotas, reservations, write budgets and shares."""

from __future__ import annotations

from holdfast.blocks.envelope import record_bytes
from holdfast.byte_size import Size
from holdfast.config.options import Config, HostOptions
from holdfast.errors import ConfigError
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.disk.kind import DiskOptions
from holdfast.tiers.host import HostBudget

SHARE_MAX = 1_000.0


def check_quotas(config: Config) -> None:
    """Raise ConfigError for the first invalid limit."""
    memory, reserved, names = config.host_bytes, 0, config.tier_names
    for name, domain in config.domains.items():
        at = f"domains.{name}"
        for tier, most in domain.quota_bytes.items():
            where = f"{at}.quota_bytes.{tier}"
            if tier not in names:
                raise ConfigError(
                    f"{where}: there is no tier {tier!r}; name one of {', '.join(names)}"
                )
            options = config.tiers[names.index(tier)]
            if not isinstance(options, HostOptions | CxlOptions | DiskOptions):
                raise ConfigError(
                    f"{where}: this node cannot count a domain's blocks on {tier}; set quotas on "
                    "the nodes or servers behind it, and remove this one"
                )
            least = record_bytes(1)
            if isinstance(options, HostOptions | CxlOptions):
                least = HostBudget(options.capacity).chunk_bytes
            if most < least:
                raise ConfigError(
                    f"{where}: {most} is less than {Size(least)}, the least that one block takes; "
                    "raise it"
                )
        for tier, nbytes in domain.reserved_bytes.items():
            if tier != "host":
                raise ConfigError(
                    f"{at}.reserved_bytes.{tier}: only memory can be reserved; name host, or limit "
                    "the other domains by quota_bytes"
                )
            quota = domain.quota_bytes.get(tier)
            if quota is not None and nbytes > quota:
                raise ConfigError(
                    f"{at}.reserved_bytes.{tier}: {nbytes} is more than the quota of {quota}; "
                    f"lower it, or raise {at}.quota_bytes.{tier}"
                )
        if domain.share is not None and not 0 < domain.share <= SHARE_MAX:
            raise ConfigError(
                f"{at}.share: {domain.share:g} is not above 0 and at most {SHARE_MAX:g}; 1 is usual"
            )
        budget = domain.write_budget_bytes_per_day
        if budget is not None and not any(isinstance(tier, DiskOptions) for tier in config.tiers):
            raise ConfigError(
                f"{at}.write_budget_bytes_per_day: {budget} given, but there is no disk tier to "
                "write to; remove it"
            )
        if budget is not None and budget < record_bytes(1):
            raise ConfigError(
                f"{at}.write_budget_bytes_per_day: {budget} is less than {Size(record_bytes(1))}, "
                "so nothing would ever be written; raise it, or leave it out for no limit"
            )
        reserved += domain.reserved_bytes.get("host", 0)
        if reserved > memory:
            raise ConfigError(
                f"{at}.reserved_bytes.host: {domain.reserved_bytes['host']} makes "
                f"{Size(reserved)} for all domains, the host tier has {memory}; lower it, or "
                "raise tiers.0.capacity"
            )
