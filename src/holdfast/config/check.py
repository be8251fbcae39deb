"""Validate a configuration: the range of each value, against other values and this machine."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from holdfast.address import exposed_addresses, tcp_endpoint
from holdfast.blocks.envelope import stored_bytes
from holdfast.byte_size import Size
from holdfast.config.options import (
    Config,
    DomainOptions,
    HostOptions,
    HttpOptions,
    RegisterOptions,
    TracesOptions,
    kind_of,
    tier_kind,
)
from holdfast.errors import ConfigError, MembershipError
from holdfast.limits import (
    CHAIN_BLOCKS_MAX,
    DAY_S,
    DURABLE_S,
    MIB,
    TARGET_CONNECTIONS_MAX,
    TARGET_CONNECTIONS_MIN,
)
from holdfast.probe import memory
from holdfast.tiers.chunks import HostBudget
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.disk.kind import DiskOptions
from holdfast.tiers.kind import BUILT_IN
from holdfast.tiers.option_checks import DEADLINE_S_MAX, check_above_zero, check_at_least
from holdfast.tiers.pool.kind import PoolOptions

HOST_BYTES_MIN = 16 * MIB
MOVE_LIMIT_MIN = MIB
"""Least bytes a second that may be moved to a tier: a block must not take hours."""
LEASE_S_MAX = 3600.0
DURABLE_DAYS_MAX = 36_500.0
DRAIN_S_MAX = 3600.0
SCRUB_S_MAX = 365 * 86_400.0
SHARE_MAX = 1_000.0
FIRST_FD = 3
"""First descriptor after stdin, stdout and stderr."""
FD_MAX = (1 << 31) - 1
ID_MAX = (1 << 32) - 2
NOBODY = 65_534
"""The kernel's overflow id: it stands for every user that this user namespace does not map."""

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


def check_domain_name(setting: str, name: str) -> None:
    """Raise ConfigError, naming the setting, for a name that no domain can have."""
    if not _DOMAIN.fullmatch(name):
        raise ConfigError(
            f"{setting}: {name!r} is not the name of a domain, which has 1 to 64 of a-z, 0-9, _ "
            "and -; rename it"
        )


def check(config: Config) -> None:
    """Raise ConfigError for the first invalid value."""
    try:
        exposed = exposed_addresses(config.addresses)
    except ConfigError as error:
        raise ConfigError(f"listen: {error}") from error
    if exposed and not (config.tls or config.tokens.key_file):
        raise ConfigError(
            f"listen: {exposed[0]!r} can be reached from other machines without authentication; "
            "set tls, or tokens.key_file, or listen on tcp://127.0.0.1"
        )
    if config.tokens.second_key_file and not config.tokens.key_file:
        raise ConfigError("tokens.second_key_file: given without tokens.key_file; add it")
    _check_tiers(config)
    if config.register:
        _check_register(config, config.register)
    _check_peers(config)
    _check_domains(config)
    _check_users(config)
    _check_quotas(config)
    _check_durable(config)
    check_above_zero("lease_s", config.lease_s, LEASE_S_MAX)
    _check_scrub(config)
    _check_http(config.http)
    _check_traces(config.traces)
    if not TARGET_CONNECTIONS_MIN <= config.target_connections <= TARGET_CONNECTIONS_MAX:
        raise ConfigError(
            f"target_connections: {config.target_connections} is not {TARGET_CONNECTIONS_MIN} to "
            f"{TARGET_CONNECTIONS_MAX}; allow six for each host that uses this target"
        )
    if not 1 <= config.segment_blocks <= CHAIN_BLOCKS_MAX:
        raise ConfigError(
            f"segment_blocks: {config.segment_blocks} is not 1 to {CHAIN_BLOCKS_MAX}; choose "
            "another, the same on all nodes that share a pool"
        )
    check_above_zero("engine.deadline_s", config.engine.deadline_s, DEADLINE_S_MAX)


def _check_http(http: HttpOptions) -> None:
    """Check that an address which other machines can reach is protected or declared open."""
    if not http.listen:
        if http.token_file or http.open:
            raise ConfigError(
                "http.listen: is empty, so the rest of http has no effect; name an address, such "
                "as tcp://127.0.0.1:9464, or remove http"
            )
        return
    try:
        exposed = exposed_addresses([http.listen])
    except ConfigError as error:
        raise ConfigError(f"http.listen: {error}") from error
    if exposed and not (http.token_file or http.open):
        raise ConfigError(
            f"http.listen: {http.listen!r} can be reached from other machines; name a token_file, "
            "or listen on 127.0.0.1, or set http.open: true to let everyone read"
        )


def _check_traces(traces: TracesOptions) -> None:
    if traces.endpoint and not traces.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"traces.endpoint: {traces.endpoint!r} does not begin with http:// or https://; name "
            "the address of a collector, such as http://127.0.0.1:4318/v1/traces"
        )
    if not 0 < traces.share <= 1:
        raise ConfigError(f"traces.share: {traces.share:g} is not in (0, 1]; correct it")
    if not traces.endpoint and traces.share != TracesOptions().share:
        raise ConfigError(
            f"traces.share: {traces.share:g} has no effect, because no requests are traced without "
            "traces.endpoint; name a collector there, or remove traces"
        )


def _check_peers(config: Config) -> None:
    """Check that a node with options for connections to other nodes has such connections."""
    lower = map(kind_of, config.tiers[1:])
    if config.target_addresses or any(kind == "pool" or kind not in BUILT_IN for kind in lower):
        return
    given = {
        "tokens.file": config.tokens.file,
        "transport": config.transport if config.transport == "nixl" else "",
        "open": config.open,
    }
    for setting, value in given.items():
        if value:
            shown = "true" if value is True else repr(value)
            raise ConfigError(
                f"{setting}: {shown} has no effect, because this node has no connections to other "
                "nodes; add a pool tier, listen on tcp://HOST:PORT, or remove it"
            )


def _check_scrub(config: Config) -> None:
    """Check that `rate` is enough to read the capacity of memory and disks within `every_s`."""
    every_s, rate = config.scrub.every_s, config.scrub.rate
    if every_s == 0:
        if rate:
            raise ConfigError(
                f"scrub.rate: {rate} a second has no effect, because scrub.every_s: 0 turns the "
                "scrub off; give a period in seconds there, or remove the rate"
            )
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
            f"scrub.rate: {rate} a second reads {Size(int(rate * every_s))} in {every_s:g} s, the "
            f"tiers hold {Size(held)}; raise it, or scrub.every_s"
        )


def _check_domains(config: Config) -> None:
    """Check the names of domains, the sources of their keys, and the public domain."""
    if config.keyring and not config.domains:
        raise ConfigError(
            f"keyring: {config.keyring!r} has no effect, because no domain has a configured key, "
            "so no block is sealed; set domains.default.key_file, or remove keyring"
        )
    public = [name for name, domain in config.domains.items() if domain.public]
    if len(public) > 1:
        raise ConfigError(
            f"domains.{public[1]}.public: {public[0]!r} is already public, and a node has at most "
            "one public domain; remove public from one of them"
        )
    for name, domain in config.domains.items():
        at = f"domains.{name}"
        check_domain_name(at, name)
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
                f"{at}.key_fd: {domain.key_fd} cannot be a key's descriptor; use {FIRST_FD} or "
                f"more, at most {FD_MAX}"
            )
        check_above_zero(f"{at}.key_timeout_s", domain.key_timeout_s, DEADLINE_S_MAX)
        if not domain.key_command and domain.key_timeout_s != DomainOptions().key_timeout_s:
            raise ConfigError(
                f"{at}.key_timeout_s: {domain.key_timeout_s:g} has no effect without key_command; "
                "remove it"
            )
        if domain.public and not domain.publish_file:
            raise ConfigError(
                f"{at}.publish_file: is empty, so no engine could write; name a file "
                "with 32 secret bytes, for the node and for the publisher's engine"
            )
        if domain.publish_file and not domain.public:
            raise ConfigError(
                f"{at}.publish_file: {domain.publish_file!r} has no effect, because the "
                "domain is not public; remove it, or set public"
            )
        if domain.quantise != "none" and not config.gates_folder:
            raise ConfigError(
                f"{at}.quantise: {domain.quantise}, but there is no folder of gate records, which "
                "permit it; set gates, or add a disk tier"
            )
        if not (domain.public and config.shares):
            continue
        # Readers of a public domain have its secret, which names its blocks. On shared tiers they
        # could forge its blocks, unless its data keys are random and not derived from the secret.
        if domain.seal is False:
            raise ConfigError(
                f"{at}.seal: false, so any writer of the tiers shared with other nodes could forge "
                "public blocks; leave it out, or make the domain public on a node without such "
                "tiers"
            )
        if not config.keyring:
            raise ConfigError(
                f"{at}.public: without a key ring the data keys are derived from the domain's "
                "secret, which every engine of the node has, so any engine could forge public "
                "blocks on the tiers shared with other nodes; set keyring to one file for all "
                "nodes of the pool"
            )


def _check_durable(config: Config) -> None:
    """Check that the durable tier exists; whether it can flush is known when it is open."""
    check_above_zero("durable_days", config.durable_days, DURABLE_DAYS_MAX, "days")
    names = config.tier_names[1:]
    keeps = any(tier_kind(tier).keep_s is not None for tier in config.tiers[1:])
    if not keeps and config.durable_days != DURABLE_S / DAY_S:
        raise ConfigError(
            f"durable_days: {config.durable_days:g} has no effect, because no tier keeps durable "
            "contexts; add a tier of kind disk, files or object, or remove it"
        )
    if config.durable and config.durable not in names:
        remedy = f"name one of {', '.join(names)}" if names else "add a disk tier"
        raise ConfigError(
            f"durable: there is no tier {config.durable!r} below the host; {remedy}, or remove "
            "durable"
        )


def _check_quotas(config: Config) -> None:
    """Check the limits of domains: quotas, reservations, write budgets and shares."""
    host_bytes, reserved, names = config.host_bytes, 0, config.tier_names
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
            least = stored_bytes(1)
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
        if budget is not None and budget < stored_bytes(1):
            raise ConfigError(
                f"{at}.write_budget_bytes_per_day: {budget} is less than {Size(stored_bytes(1))}, "
                "so nothing would ever be written; raise it, or leave it out for no limit"
            )
        reserved += domain.reserved_bytes.get("host", 0)
        if reserved > host_bytes:
            raise ConfigError(
                f"{at}.reserved_bytes.host: {domain.reserved_bytes['host']} makes "
                f"{Size(reserved)} for all domains, the host tier has {host_bytes}; lower it, or "
                "raise tiers.0.capacity"
            )


def _check_users(config: Config) -> None:
    """Check the users and groups that may open the socket, and sessions in the domains."""
    for name, domain in config.domains.items():
        at = f"domains.{name}.users"
        for i, user in enumerate(domain.users):
            _check_id(f"{at}.{i}", user)
        if domain.users and not config.node_address:
            raise ConfigError(
                f"{at}: this node has no Unix socket for them to open; remove it, or also listen "
                "on unix:///PATH"
            )
    if config.socket_group != "":
        _check_id("socket_group", config.socket_group)
        if not any(domain.users for domain in config.domains.values()):
            raise ConfigError(
                f"socket_group: {config.socket_group!r} could open the socket, but no domain; "
                "list its users in domains.NAME.users, or remove it"
            )


def _check_id(at: str, value: str | int) -> None:
    if isinstance(value, str):
        if not value or value == "nobody":
            raise ConfigError(f"{at}: {value!r} does not name a user; give a name or a number")
        return
    if not 0 <= value <= ID_MAX or value == NOBODY:
        raise ConfigError(
            f"{at}: {value} is not from 0 to {ID_MAX}, or is {NOBODY}, which stands for any "
            "unknown user; give another"
        )


def _check_register(config: Config, register: RegisterOptions) -> None:
    from holdfast.membership.member_list import read_member

    url = urlsplit(register.members)
    if url.scheme != "etcd" or not url.netloc:
        raise ConfigError(
            f"register.members: {register.members!r} does not take registrations; write "
            "etcd://HOST:PORT, or leave register out and list this target where its clients look"
        )
    places = [at for at in config.target_addresses if not tcp_endpoint(at).is_wildcard]
    if not config.target_addresses or not (register.address or places):
        raise ConfigError(
            f"register.address: other hosts cannot connect to {', '.join(config.addresses)}; "
            "listen on tcp://HOST:PORT, and give the address for other hosts"
        )
    check_above_zero("register.drain_s", register.drain_s, DRAIN_S_MAX)
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


def _check_lock(host: HostOptions, at: str) -> None:
    """Raise ConfigError for a limit of locked memory that means nothing."""
    try:
        most = host.lock_bytes
    except ValueError as error:
        raise ConfigError(
            f"{at}.lock: {host.lock!r} is neither auto nor off, and {error}"
        ) from error
    if most is not None and most > host.capacity:
        raise ConfigError(
            f"{at}.lock: {Size(most)} given, {at}.capacity is {host.capacity}; engines lock memory "
            "of the tier only: lower it, or write auto"
        )


def _check_tiers(config: Config) -> None:
    tiers = config.tiers
    if [type(tier) for tier in tiers].count(HostOptions) != 1 or not isinstance(
        tiers[0], HostOptions
    ):
        names = ", ".join(map(kind_of, tiers)) or "nothing"
        raise ConfigError(
            f"tiers: {names} given; name one host tier, first, then any others, fastest first"
        )
    folders: dict[str, int] = {}
    for number, tier in enumerate(tiers):
        at = f"tiers.{number}"
        if isinstance(tier, HostOptions):
            check_at_least(tier.capacity, HOST_BYTES_MIN, f"{at}.capacity")
            limit = memory()
            if tier.capacity > limit.nbytes:
                raise ConfigError(
                    f"{at}.capacity: {tier.capacity} given, {limit.source} is "
                    f"{Size(limit.nbytes)}; lower it"
                )
            _check_lock(tier, at)
            continue
        kind = tier_kind(tier)
        kind.check(tier, at)
        move_limit = getattr(tier, "move_limit", None)  # an installed kind may have none
        if move_limit is not None:
            check_at_least(move_limit, MOVE_LIMIT_MIN, f"{at}.move_limit")
        if isinstance(tier, CxlOptions):
            _check_cxl_place(config, tier, number)
        if kind.shared and "default" not in config.domains:
            store = "pool" if isinstance(tier, PoolOptions) else "store"
            raise ConfigError(
                f"{at}: nodes find each other's blocks in a {store} only if they have the same "
                "key; set domains.default.key_file to that key on all nodes"
            )
        if isinstance(tier, DiskOptions):
            first = folders.setdefault(os.path.realpath(tier.path), number)
            if first != number:
                raise ConfigError(
                    f"{at}.path: {tier.path!r} is also the folder of tiers.{first}; give each disk "
                    "tier its own"
                )


def _check_cxl_place(config: Config, tier: CxlOptions, number: int) -> None:
    """Check a CXL tier beside the other tiers: their order, and that no memory is used twice."""
    at, tiers = f"tiers.{number}", config.tiers
    if not isinstance(tiers[number - 1], HostOptions | CxlOptions):
        raise ConfigError(
            f"{at}.kind: 'cxl' is listed after {kind_of(tiers[number - 1])!r}; put the fastest "
            "first: host, cxl, disk, then shared tiers"
        )
    for other in range(number):
        before = tiers[other]
        if isinstance(before, CxlOptions) and (before.device or before.node) == (
            tier.device or tier.node
        ):
            raise ConfigError(
                f"{at}: {tier.device or tier.node!r} is also the memory of tiers.{other}; give "
                "that one the capacity of both"
            )
    if tier.node == "any":
        limit = memory()
        asked = Size(tier.capacity + config.host_bytes)
        if asked > limit.nbytes:
            raise ConfigError(
                f"{at}.capacity: {asked} given together with the host tier, {limit.source} is "
                f"{Size(limit.nbytes)}; lower it, or name a node of CXL memory"
            )
