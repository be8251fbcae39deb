"""Check a configuration as a whole: what each value may be, beside the others and this machine."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from holdfast.config.check_quotas import check_quotas
from holdfast.config.check_users import check_users
from holdfast.config.options import (
    Config,
    CxlOptions,
    DiskOptions,
    DomainOptions,
    HostOptions,
    MooncakeOptions,
    PoolOptions,
    RegisterOptions,
    Size,
    TierOptions,
    ValkeyOptions,
)
from holdfast.errors import ConfigError, MembershipError
from holdfast.limits import CHAIN_BLOCKS_MAX, MIB
from holdfast.probe import memory
from holdfast.wire.address import exposed_addresses, tcp_endpoint

HOST_BYTES_MIN = 16 * MIB
DISK_BYTES_MIN = 16 * MIB
DISK_BYTES_MAX = 1 << 50
"""A table of more regions takes longer to lay out than anybody waits."""
READ_LIMIT_MIN = MIB
LANE_BYTES_MIN = MIB
DEADLINE_S_MAX = 60.0
LEASE_S_MAX = 3600.0
RAMP_S_MAX = 86_400.0
DRAIN_S_MAX = 3600.0
SCRUB_S_MAX = 365 * 86_400.0
TTL_S_MAX = 10 * 365 * 86_400.0
WRITES_PER_DAY_MAX = 1_000.0
FIRST_FD = 3
"""Descriptors before this are input, output and errors."""
FD_MAX = (1 << 31) - 1

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def check(config: Config) -> None:
    """Raise ConfigError for the first thing that can not be; else return."""
    _check_listen(config)
    _check_tiers(config)
    if config.register:
        _check_register(config, config.register)
    for name, domain in config.domains.items():
        _check_domain(name, domain)
    _check_public(config)
    check_users(config)
    check_quotas(config)
    _within("lease_s", config.lease_s, LEASE_S_MAX)
    _check_scrub(config)
    if not 1 <= config.segment_blocks <= CHAIN_BLOCKS_MAX:
        raise ConfigError(
            f"segment_blocks: {config.segment_blocks} is not 1 to {CHAIN_BLOCKS_MAX}; choose "
            "another, the same on all nodes that share a pool"
        )
    _within("engine.deadline_s", config.engine.deadline_s, DEADLINE_S_MAX)


def _check_scrub(config: Config) -> None:
    """A pass must be possible in its time: what memory and disks can hold, at the rate given."""
    every_s, rate = config.scrub.every_s, config.scrub.rate
    if every_s == 0:
        return
    if not 0 <= every_s <= SCRUB_S_MAX:
        raise ConfigError(
            f"scrub.every_s: {every_s:,.10g} s is not from 0 to {SCRUB_S_MAX:,.0f} s (a year); "
            "correct it, 0 turns it off"
        )
    held = sum(
        t.capacity for t in config.tiers if isinstance(t, HostOptions | CxlOptions | DiskOptions)
    )
    if rate and rate * every_s < held:
        raise ConfigError(
            f"scrub.rate: {rate} a second read {Size(int(rate * every_s))} in {every_s:g} s, the "
            f"tiers hold {Size(held)}; raise it, or scrub.every_s"
        )


def _check_domain(name: str, domain: DomainOptions) -> None:
    at = f"domains.{name}"
    if not _DOMAIN.fullmatch(name):
        raise ConfigError(f"{at}: a domain's name has 1 to 64 of a-z, 0-9, _ and -; rename it")
    sources = {
        "key_file": domain.key_file,
        "key_fd": domain.key_fd is not None,
        "key_command": domain.key_command,
    }
    given = [source for source, value in sources.items() if value]
    if len(given) != 1:
        raise ConfigError(
            f"{at}: {' and '.join(given) or 'no key'} given; name one of {', '.join(sources)}"
        )
    if domain.key_fd is not None and not FIRST_FD <= domain.key_fd <= FD_MAX:
        raise ConfigError(
            f"{at}.key_fd: {domain.key_fd} is not a descriptor of yours; use {FIRST_FD} or more, "
            f"at most {FD_MAX}"
        )
    _within(f"{at}.key_timeout_s", domain.key_timeout_s, DEADLINE_S_MAX)


def _check_public(config: Config) -> None:
    """At most one domain is public, and it says who may write."""
    public = [name for name, domain in config.domains.items() if domain.public]
    if len(public) > 1:
        raise ConfigError(
            f"domains.{public[1]}.public: {public[0]!r} is public already; a node has one"
        )
    for name, domain in config.domains.items():
        if domain.public and not domain.publish_file:
            raise ConfigError(
                f"domains.{name}.publish_file: is empty, so nobody could write; name a file with "
                "32 secret bytes, for the node and for the publisher's engine"
            )
        if domain.publish_file and not domain.public:
            raise ConfigError(
                f"domains.{name}.publish_file: {domain.publish_file!r} is of no use, as the domain "
                "is not public; remove it, or set public"
            )
        if domain.public and config.shares:
            _check_shared_public(f"domains.{name}", domain, config.keyring)


def _check_shared_public(at: str, domain: DomainOptions, keyring: str) -> None:
    """What lies where others write is the publisher's only if no reader could have sealed it.

    Readers have the domain's secret, which names its blocks; data keys must not follow from it.
    """
    if domain.seal is False:
        raise ConfigError(
            f"{at}.seal: false, so whoever can write to the tiers shared with other nodes could "
            "write what everybody reads; leave it out, or make the domain public on a node "
            "without such tiers"
        )
    if not keyring:
        raise ConfigError(
            f"{at}.public: without a key ring the data keys follow from the domain's secret, which "
            "every engine of the node has: any of them could seal what everybody reads, for the "
            "tiers shared with other nodes; set keyring to one file for all nodes of the pool"
        )


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


def _check_register(config: Config, register: RegisterOptions) -> None:
    from holdfast.tiers.pool.roster import read_member

    url = urlsplit(register.members)
    if url.scheme != "etcd" or not url.netloc:
        raise ConfigError(
            f"register.members: {register.members!r} takes no registrations; write "
            "etcd://HOST:PORT, or leave register out and list this target where its clients look"
        )
    places = [at for at in config.target_addresses if not tcp_endpoint(at).is_anywhere]
    if not config.target_addresses or not (register.address or places):
        raise ConfigError(
            f"register.address: other hosts can not connect to {', '.join(config.addresses)}; "
            "listen on tcp://HOST:PORT, and give the address that they use"
        )
    _within("register.drain_s", register.drain_s, DRAIN_S_MAX)
    member = {
        "id": register.id or "this-host",
        "address": register.address or places[0],
        "weight": register.weight,
        "zone": register.zone,
    }
    try:
        read_member(member, "register")
    except MembershipError as error:
        raise ConfigError(str(error)) from error


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
            case CxlOptions():
                _check_cxl(config, tier, number)
            case DiskOptions():
                _check_disk(tier, f"tiers.{number}")
                if paths.setdefault(tier.path, number) != number:
                    raise ConfigError(
                        f"tiers.{number}.path: {tier.path!r} is the folder of "
                        f"tiers.{paths[tier.path]} too; give each disk tier its own"
                    )
            case PoolOptions():
                _within(f"tiers.{number}.deadline_s", tier.deadline_s, DEADLINE_S_MAX)
                _within(f"tiers.{number}.ask_s", tier.ask_s, DEADLINE_S_MAX)
                _within(f"tiers.{number}.ramp_s", tier.ramp_s, RAMP_S_MAX)
                _check_key(config, f"tiers.{number}", "pool")
            case ValkeyOptions():
                _check_valkey(tier, f"tiers.{number}")
                _check_key(config, f"tiers.{number}", "store")
            case MooncakeOptions():
                _check_mooncake(tier, f"tiers.{number}")
                _check_key(config, f"tiers.{number}", "store")


def _check_host(tier: HostOptions, at: str) -> None:
    _at_least(tier.capacity, HOST_BYTES_MIN, at)
    limit = memory()
    if tier.capacity > limit.nbytes:
        raise ConfigError(
            f"{at}: {tier.capacity} asked, {limit.source} is {Size(limit.nbytes)}; lower it"
        )


def _check_cxl(config: Config, tier: CxlOptions, number: int) -> None:
    """Say where it is, once; whether that is there is looked at when it is opened."""
    at, tiers = f"tiers.{number}", config.tiers
    _at_least(tier.capacity, HOST_BYTES_MIN, f"{at}.capacity")
    if (tier.node is None) == (not tier.device):
        given = f"node {tier.node} and device {tier.device!r}" if tier.device else "neither"
        raise ConfigError(
            f"{at}: {given} given; name a node without processors or a DAX device, or node: any "
            "for ordinary memory"
        )
    if isinstance(tier.node, int) and tier.node < 0:
        raise ConfigError(f"{at}.node: {tier.node} is no node; doctor counts them from 0")
    if not isinstance(tiers[number - 1], HostOptions | CxlOptions):
        raise ConfigError(
            f"{at}.kind: 'cxl' stands behind {_kind(tiers[number - 1])!r}; put the fastest first: "
            "host, cxl, disk, then what other nodes share"
        )
    for other in range(number):
        before = tiers[other]
        if isinstance(before, CxlOptions) and (before.device or before.node) == (
            tier.device or tier.node
        ):
            raise ConfigError(
                f"{at}: {tier.device or tier.node!r} is the memory of tiers.{other} too; give that "
                "one the capacity of both"
            )
    if tier.node == "any":
        limit = memory()
        asked = Size(tier.capacity + sum(t.capacity for t in tiers if isinstance(t, HostOptions)))
        if asked > limit.nbytes:
            raise ConfigError(
                f"{at}.capacity: {asked} asked together with the host tier, {limit.source} is "
                f"{Size(limit.nbytes)}; lower it, or name a node of CXL memory"
            )


def _check_disk(tier: DiskOptions, at: str) -> None:
    _at_least(tier.capacity, DISK_BYTES_MIN, f"{at}.capacity")
    if tier.capacity > DISK_BYTES_MAX:
        raise ConfigError(
            f"{at}.capacity: {tier.capacity} is more than {Size(DISK_BYTES_MAX)}; lower it to what "
            "the drive has"
        )
    if not tier.path:
        raise ConfigError(f"{at}.path: is empty; name a folder for the blocks")
    if tier.read_limit is not None:
        _at_least(tier.read_limit, READ_LIMIT_MIN, f"{at}.read_limit")
    if tier.writes_per_day is not None:
        _check_writes(tier.writes_per_day, f"{at}.writes_per_day")


def _check_writes(writes_per_day: float, at: str) -> None:
    if not 0 < writes_per_day <= WRITES_PER_DAY_MAX:
        raise ConfigError(
            f"{at}: {writes_per_day:g} times the capacity a day is not above 0 and at most "
            f"{WRITES_PER_DAY_MAX:g}; take the drive's rating, or leave it out for no limit"
        )


def _check_key(config: Config, at: str, kind: str) -> None:
    if "default" not in config.domains:
        raise ConfigError(
            f"{at}: nodes find each other's blocks in a {kind} only under one "
            "key; set domains.default.key_file to the same key on all of them"
        )


def _check_mooncake(tier: MooncakeOptions, at: str) -> None:
    _check_calls(tier, at)
    _check_address(tier.master, f"{at}.master")
    _at_least(tier.lane, LANE_BYTES_MIN, f"{at}.lane")


def _check_calls(tier: ValkeyOptions | MooncakeOptions, at: str) -> None:
    _within(f"{at}.deadline_s", tier.deadline_s, DEADLINE_S_MAX)
    _within(f"{at}.ask_s", tier.ask_s, DEADLINE_S_MAX)
    if not _PREFIX.fullmatch(tier.prefix):
        raise ConfigError(
            f"{at}.prefix: {tier.prefix!r} does not begin keys; use 1 to 64 of A-Z, a-z, 0-9, "
            "_, -, . and :"
        )


def _check_address(address: str, at: str) -> None:
    try:
        tcp_endpoint(address)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error


def _check_valkey(tier: ValkeyOptions, at: str) -> None:
    _check_calls(tier, at)
    for address in tier.addresses:
        _check_address(address, f"{at}.address")
    if len(tier.addresses) != 1 and not (tier.addresses and tier.cluster):
        raise ConfigError(
            f"{at}.address: {len(tier.addresses)} addresses given; name one server, or some "
            "servers of a cluster and set cluster: true"
        )
    if tier.database < 0 or (tier.cluster and tier.database):
        raise ConfigError(
            f"{at}.database: {tier.database} does not exist in a cluster, nor below 0; remove it"
        )
    if not 0 <= tier.ttl_s <= TTL_S_MAX:
        raise ConfigError(
            f"{at}.ttl_s: {tier.ttl_s:g} s is not from 0 to {TTL_S_MAX:.0f} s (ten years); 0 "
            "leaves it to the server"
        )
    for name, other in (("user", "password_file"), ("tls_cert", "tls_ca"), ("tls_key", "tls_cert")):
        if getattr(tier, name) and not getattr(tier, other):
            raise ConfigError(f"{at}.{name}: given without {other}; add it")


def _at_least(size: Size, least: int, at: str) -> None:
    if size < least:
        raise ConfigError(f"{at}: {size} is less than {Size(least)}; raise it")


def _kind(tier: TierOptions) -> str:
    return str(tier.__struct_config__.tag)


def _within(at: str, value: float, limit: float) -> None:
    if not 0 < value <= limit:
        remedy = "lower it" if value > limit else "raise it"
        raise ConfigError(
            f"{at}: {value:,.10g} s is not above 0 and at most {limit:,.0f} s; {remedy}"
        )
