"""Check a configuration as a whole: what each value may be, beside the others and this machine."""

from __future__ import annotations

import re

from holdfast.config.options import (
    Config,
    DiskOptions,
    HostOptions,
    PoolOptions,
    Size,
    TierOptions,
)
from holdfast.errors import ConfigError
from holdfast.limits import MIB
from holdfast.probe import memory
from holdfast.wire.address import exposed_addresses

HOST_BYTES_MIN = 16 * MIB
DISK_BYTES_MIN = 16 * MIB
DEADLINE_S_MAX = 60.0
LEASE_S_MAX = 3600.0

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def check(config: Config) -> None:
    """Raise ConfigError for the first thing that can not be; else return."""
    _check_listen(config)
    _check_tiers(config)
    for name in config.domains:
        if not _DOMAIN.fullmatch(name):
            raise ConfigError(
                f"domains.{name}: a domain's name has 1 to 64 of a-z, 0-9, _ and -; rename it"
            )
    _within("lease_s", config.lease_s, LEASE_S_MAX)
    _within("engine.deadline_s", config.engine.deadline_s, DEADLINE_S_MAX)


def _check_listen(config: Config) -> None:
    try:
        exposed = exposed_addresses(config.addresses)
    except ConfigError as error:
        raise ConfigError(f"listen: {error}") from error
    if exposed and not (config.tls or config.tokens.key_file):
        raise ConfigError(
            f"listen: {exposed[0]!r} can be reached from other machines, and nothing says who may "
            "come in; set tls, or tokens.key_file, or listen on tcp://127.0.0.1"
        )


def _check_tiers(config: Config) -> None:
    tiers = config.tiers
    if [type(tier) for tier in tiers].count(HostOptions) != 1 or not isinstance(
        tiers[0], HostOptions
    ):
        names = ", ".join(map(_kind, tiers)) or "nothing"
        raise ConfigError(
            f"tiers: {names} given; name one host tier, first, then any others, fastest first"
        )
    paths: dict[str, int] = {}
    for number, tier in enumerate(tiers):
        match tier:
            case HostOptions():
                _check_host(tier, f"tiers.{number}.capacity")
            case DiskOptions():
                _at_least(tier.capacity, DISK_BYTES_MIN, f"tiers.{number}.capacity")
                if paths.setdefault(tier.path, number) != number:
                    raise ConfigError(
                        f"tiers.{number}.path: {tier.path!r} is the folder of "
                        f"tiers.{paths[tier.path]} too; give each disk tier its own"
                    )
            case PoolOptions():
                _within(f"tiers.{number}.deadline_s", tier.deadline_s, DEADLINE_S_MAX)
                if "default" not in config.domains:
                    raise ConfigError(
                        f"tiers.{number}: nodes find each other's blocks in a pool only under one "
                        "key; set domains.default.key_file to the same key on all of them"
                    )


def _check_host(tier: HostOptions, at: str) -> None:
    _at_least(tier.capacity, HOST_BYTES_MIN, at)
    limit = memory()
    if tier.capacity > limit.nbytes:
        raise ConfigError(
            f"{at}: {tier.capacity} asked, {limit.source} is {Size(limit.nbytes)}; lower it"
        )


def _at_least(size: Size, least: int, at: str) -> None:
    if size < least:
        raise ConfigError(f"{at}: {size} is less than {Size(least)}; raise it")


def _kind(tier: TierOptions) -> str:
    return str(tier.__struct_config__.tag)


def _within(at: str, value: float, limit: float) -> None:
    if not 0 < value <= limit:
        raise ConfigError(f"{at}: {value:g} s is not above 0 and at most {limit:g} s")
