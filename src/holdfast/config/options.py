"""All options and their defaults, as frozen structs."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.address import is_tcp
from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.limits import CONNECTIONS_MAX, DAY_S, DURABLE_S, LEASE_S, SEGMENT_BLOCKS, WEEK_S
from holdfast.prepared import prepared
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.disk.kind import DiskOptions
from holdfast.tiers.files.kind import FilesOptions
from holdfast.tiers.kind import BUILT_IN, TierKind, TierSection, built_in_kind, find_kind
from holdfast.tiers.mooncake.kind import MooncakeOptions
from holdfast.tiers.object.kind import ObjectOptions
from holdfast.tiers.pool.kind import PoolOptions
from holdfast.tiers.valkey.kind import ValkeyOptions
from holdfast.wire.remote.credentials import TlsFiles

LOCK_AUTO, LOCK_OFF = "auto", "off"

KEYRING_NAME = "keyring.json"
AUDIT_NAME = "audit.jsonl"
GATES_NAME = "gates"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class HostOptions(TierSection, frozen=True, tag="host", tag_field="kind"):
    """The host tier: memory that all domains share, in bytes.

    `lock`: how much memory the engines of a domain may page-lock for their GPU: `auto` for what is
    not reserved for other domains, `off`, or a size. Engines on GPUs of AMD lock only with a size.
    """

    capacity: Size
    lock: str | int = LOCK_AUTO

    @property
    def lock_bytes(self) -> int | None:
        """Bytes that engines of a domain may lock; None: no limit. Raises ValueError for others."""
        if self.lock == LOCK_AUTO:
            return None
        return 0 if self.lock == LOCK_OFF else Size.of(self.lock)


TierOptions = (
    HostOptions
    | CxlOptions
    | DiskOptions
    | PoolOptions
    | FilesOptions
    | ObjectOptions
    | ValkeyOptions
    | MooncakeOptions
)
"""A tier's section; `parse` adds the sections of the kinds that other packages provide."""


def kind_of(tier: TierOptions) -> str:
    """Return the kind of a tier, as its section names it."""
    return str(tier.__struct_config__.tag)


def tier_kind(tier: TierOptions) -> TierKind:
    """Return the kind of a tier below the host; raise ConfigError if it is not installed."""
    name = kind_of(tier)
    kind = built_in_kind(name) if name in BUILT_IN else find_kind(name)
    if kind is None:
        raise ConfigError(f"tiers: kind {name!r} is not installed; install its package")
    return kind


def changed_options(tier: TierOptions) -> list[tuple[str, object]]:
    """Return the names and values of a tier's options that differ from their defaults."""
    return [
        (field.name, value)
        for field in msgspec.structs.fields(tier)
        if (value := getattr(tier, field.name)) != field.default
    ]


class DomainOptions(_Section, frozen=True):
    """A trust domain and the source of its key: a file, a descriptor or a command.

    The key is 32 bytes, raw or as 64 hex digits. `key_fd` is the number of a descriptor that is
    open when the node starts; `key_command` prints the key, within `key_timeout_s`. `seal` None
    seals the domain's blocks below the host tier if that is possible. `public`: all other domains
    may read it, and only an engine with the secret of `publish_file` may write it.

    `quantise`: store portable blocks with a lossy codec, where a gate record permits it.

    `quota_bytes`: maximum bytes held, by tier. `reserved_bytes`: memory that other domains cannot
    take from it, by tier. `share`: its weight relative to other domains for unreserved memory, tier
    bandwidth and the node's threads; None is 1, and has no effect unless a domain has a share, a
    quota or a reservation. `users`: names or numbers of the users that may open a session in it;
    if empty, the node's user and root.
    """

    key_file: str = ""
    key_fd: int | None = None
    key_command: list[str] = []
    key_timeout_s: float = 10.0
    seal: bool | None = None
    public: bool = False
    publish_file: str = ""
    quantise: Literal["none", "int8"] = "none"
    quota_bytes: dict[str, Size] = {}
    reserved_bytes: dict[str, Size] = {}
    write_budget_bytes_per_day: Size | None = None
    share: float | None = None
    users: list[str | int] = []

    @property
    def divides(self) -> bool:
        """Whether this domain has a quota, a reservation or a share."""
        return bool(self.quota_bytes or self.reserved_bytes or self.share is not None)


class TokenOptions(_Section, frozen=True):
    """Files for tokens: the keys with which a target verifies them, and this node's own token.

    `key_file` has 32 bytes, or 64 hex digits. So has `second_key_file`, which need not exist: it
    is there while the key is replaced. `file` is the output of `holdfast token`.
    """

    key_file: str = ""
    second_key_file: str = ""
    file: str = ""


class RegisterOptions(_Section, frozen=True):
    """Registration of a target as a member of a pool in etcd; times in seconds.

    `members` equals that of its clients' pool tier: etcd://HOST:PORT[,HOST:PORT][/PREFIX], with the
    TLS files if any. Empty `id`: this host's name; empty `address`: its listening address. `weight`
    is its relative share (its capacity in TiB, for example). `drain_s`: time for which it continues
    to serve after it was told to stop.
    """

    members: str
    id: str = ""
    address: str = ""
    weight: float = 1.0
    zone: str = ""
    drain_s: float = 5.0


class ScrubOptions(_Section, frozen=True):
    """The background scrub: every stored record is read and verified once in `every_s` seconds.

    0 turns it off. `rate` limits its reads, in bytes a second; 0: as fast as `every_s` requires.
    """

    every_s: float = WEEK_S
    rate: Size = Size(0)


class HttpOptions(_Section, frozen=True):
    """Metrics, health and the status page over HTTP; off if `listen` is empty.

    `listen`: tcp://HOST:PORT, or unix:///PATH for this node's user. `token_file`: a file with a
    secret that clients present, as a bearer token or as the password of basic authentication; the
    health paths need none. Without it, only loopback addresses are allowed, and clients of the
    node's user and root, unless `open`, which shows every client that can connect the names of
    domains, and how much they hold.
    """

    listen: str = ""
    token_file: str = ""
    open: bool = False


class TracesOptions(_Section, frozen=True):
    """Traces of requests for OpenTelemetry; off if `endpoint` is empty.

    `endpoint`: where a collector takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.
    `share`: share of the requests to trace, above 0 and at most 1. A request whose engine sends its
    own trace is traced if, and only if, the engine traces it.
    """

    endpoint: str = ""
    share: float = 1.0


class EngineOptions(_Section, frozen=True):
    """Options of an engine's connector.

    `deadline_s`: a fetch that takes longer is cancelled and recomputed. `save` False: read only.
    `model_digest`: the model's identity, instead of one derived from the model's files.
    """

    deadline_s: float = 5.0
    save: bool = True
    model_digest: str = ""


@prepared
class Config(_Section, frozen=True):
    """The configuration of a node and of the engines on its machine.

    `transport`: transport of records between nodes: NIXL if both ends have it and RDMA (`auto`),
    NIXL if both ends have it (`nixl`), or TCP (`tcp`). `write`: copy new blocks to the next tier
    soon after their save (`behind`), or when they are evicted from memory (`on_eviction`).
    `policy`: the eviction policy of memory. `plan`: fetch the blocks that minimise the time to the
    first token (`best`), or all held blocks that arrive within the engine's deadline (`held`).
    `lease_s`: duration of a lease; an engine must copy the blocks within it. `keyring`: the file
    with the domains' data keys, shared by the nodes of a pool; if empty, a file beside the first
    disk tier. `audit`: the audit log of key changes; if empty, beside the key ring. `gates`: the
    folder with the gate records of lossy codecs; if empty, a folder beside the first disk tier.
    `record`: a file to which every request's length, time and keys are appended; empty for none.
    `target_connections`: most connections of other nodes at once, on each TCP address.
    `segment_blocks`: number of consecutive blocks of a chain on one target of a pool or server of a
    cluster; equal on all nodes that share it. `durable`: name of the tier that keeps durable
    contexts; if empty, the last one that can flush its records. `durable_days`: days for which a
    context that was saved as durable is one. `socket_group`: a group, by name or number, whose
    members may also open the node's socket; if empty, only its user. `open`: on loopback TCP
    without TLS and tokens, accept connections of any local user, and any local user's targets;
    False: only those of the node's own user and root.
    """

    listen: str | list[str]
    tiers: list[TierOptions]
    domains: dict[str, DomainOptions] = {}
    keyring: str = ""
    audit: str = ""
    gates: str = ""
    record: str = ""
    write: Literal["behind", "on_eviction"] = "behind"
    policy: Literal["cost_aware", "leaf_lru", "s3fifo", "lirs"] = "cost_aware"
    plan: Literal["best", "held"] = "best"
    lease_s: float = LEASE_S
    engine: EngineOptions = EngineOptions()
    scrub: ScrubOptions = ScrubOptions()
    tls: TlsFiles | None = None
    tokens: TokenOptions = TokenOptions()
    register: RegisterOptions | None = None
    http: HttpOptions = HttpOptions()
    traces: TracesOptions = TracesOptions()
    transport: Literal["auto", "nixl", "tcp"] = "auto"
    target_connections: int = CONNECTIONS_MAX
    segment_blocks: int = SEGMENT_BLOCKS
    durable: str = ""
    durable_days: float = DURABLE_S / DAY_S
    socket_group: str | int = ""
    open: bool = False

    @property
    def addresses(self) -> list[str]:
        """All addresses that this node listens on."""
        return [self.listen] if isinstance(self.listen, str) else self.listen

    @property
    def disk_folder(self) -> str:
        """The folder of the first disk tier, for the node's persistent state; empty if none."""
        return next((tier.path for tier in self.tiers if isinstance(tier, DiskOptions)), "")

    @property
    def tier_names(self) -> list[str]:
        """The name of each tier: its kind, with a number from the third tier on."""
        kinds = [kind_of(tier) for tier in self.tiers]
        return kinds[:2] + [f"{kind}{number}" for number, kind in enumerate(kinds[2:], start=1)]

    @property
    def keyring_file(self) -> str:
        """The path of the key ring; empty without a disk tier to keep it beside."""
        folder = self.disk_folder
        return self.keyring or (f"{folder}/{KEYRING_NAME}" if folder else "")

    @property
    def audit_file(self) -> str:
        """The path of the audit log; empty without a disk tier to keep it beside."""
        folder = self.disk_folder
        return self.audit or (f"{folder}/{AUDIT_NAME}" if folder else "")

    @property
    def gates_folder(self) -> str:
        """The folder of gate records; empty without a disk tier to keep it beside."""
        folder = self.disk_folder
        return self.gates or (f"{folder}/{GATES_NAME}" if folder else "")

    @property
    def host_bytes(self) -> Size:
        """The capacity of the host tier."""
        return next(tier.capacity for tier in self.tiers if isinstance(tier, HostOptions))

    @property
    def lock_bytes(self) -> int | None:
        """Memory that engines of one domain may page-lock; None: no limit."""
        return next(tier.lock_bytes for tier in self.tiers if isinstance(tier, HostOptions))

    @property
    def shares(self) -> bool:
        """Whether other nodes also write to a tier."""
        below = (tier for tier in self.tiers if not isinstance(tier, HostOptions))
        return any(tier_kind(tier).shared for tier in below)

    @property
    def node_address(self) -> str:
        """The Unix socket for engines of this machine; empty if the node is only a target."""
        return next((address for address in self.addresses if not is_tcp(address)), "")

    @property
    def target_addresses(self) -> list[str]:
        """The TCP addresses for other nodes."""
        return [address for address in self.addresses if is_tcp(address)]
