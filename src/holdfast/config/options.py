"""Every option, as frozen structs: what can be said, and what is so if nothing is said."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from holdfast.limits import GIB, KIB, LEASE_S, MIB, SEGMENT_BLOCKS, WEEK_S
from holdfast.prepared import prepared
from holdfast.wire.address import is_tcp

KEYRING_NAME = "keyring.json"
AUDIT_NAME = "audit.jsonl"

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": KIB * KIB, "gib": GIB, "tib": KIB * GIB}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", re.IGNORECASE)


SIZE_LIMIT = 1 << 60
"""1 EiB: no tier comes near it, and below it arithmetic with floats is safe."""

Admit = Literal["always", "second_touch", "reuse", "reuse_interval"]


class Size(int):
    """A number of bytes, written as such or as text such as "64 GiB"."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> Size:
        """Read a size; raise ValueError saying how to write one."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls._within(value)
        found = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if found is None or found[2].lower() not in _UNITS:
            raise ValueError('not a size; write bytes, or a number and a unit such as "64 GiB"')
        return cls._within(float(found[1]) * _UNITS[found[2].lower()])

    @classmethod
    def _within(cls, nbytes: float) -> Size:
        if nbytes >= SIZE_LIMIT:
            raise ValueError("more than there is of anything; write less than 1 EiB")
        return cls(nbytes)

    def __str__(self) -> str:
        """Return the size in the largest unit that leaves a readable number."""
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self >= _UNITS[unit.lower()]:
                return f"{int(self) / _UNITS[unit.lower()]:.4g} {unit}"
        return f"{int(self)} B"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class HostOptions(_Section, frozen=True, tag="host", tag_field="kind"):
    """The host tier: memory that all domains share, in bytes."""

    capacity: Size


class CxlOptions(_Section, frozen=True, tag="cxl", tag_field="kind"):
    """A tier of CXL memory, in bytes; what lies there does not survive the node.

    `node`: the number of a NUMA node without processors, or "any": ordinary memory, to try it out;
    or `device`: a DAX device, /dev/daxX.Y. `admit`: which blocks are copied to it. `thrash_guard`:
    copy none for a while if they leave again unused.
    """

    capacity: Size
    node: int | Literal["any"] | None = None
    device: str = ""
    admit: Admit = "reuse_interval"
    thrash_guard: bool = True


class DiskOptions(_Section, frozen=True, tag="disk", tag_field="kind"):
    """A disk tier: a folder of its own, the bytes it may use, and the size of its regions.

    `admit`: which blocks are written to it; `writes_per_day`: how often its capacity, at most.
    `thrash_guard`: write none for a while if they leave again unused.
    `read_limit`: bytes a second that reading may take of the drive; all it gives if left out.
    """

    path: str
    capacity: Size
    region: Size | None = None
    admit: Admit = "always"
    thrash_guard: bool = False
    writes_per_day: float | None = None
    read_limit: Size | None = None


class PoolOptions(_Section, frozen=True, tag="pool", tag_field="kind"):
    """A pool of targets. `members` says who they are; times in seconds.

    `deadline_s` bounds one call to one of them, `ask_s` a question what it holds.

    `members`: a YAML file, or dns://NAME:PORT, dns://_SERVICE._tcp.NAME,
    kubernetes://[NAMESPACE/]SERVICE[:PORT] or etcd://HOST:PORT[,HOST:PORT][/PREFIX], behind which
    ?ca=FILE&cert=FILE&key=FILE makes it TLS (cert and key where etcd wants one of ours).
    `ramp_s`: a target that joins gets a sixteenth of its share at first, all of it by then.
    """

    members: str
    deadline_s: float = 2.0
    ask_s: float = 0.25
    ramp_s: float = 300.0


class ValkeyOptions(_Section, frozen=True, tag="valkey", tag_field="kind"):
    """A Redis or Valkey server, or a cluster, that already runs; times in seconds.

    `address`: tcp://HOST:PORT, or a list of some servers of a cluster. `ttl_s`: how long a record
    is kept after it was written; 0 leaves it to the server. TLS is used if `tls_ca` is given.
    """

    address: str | list[str]
    cluster: bool = False
    database: int = 0
    user: str = ""
    password_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    prefix: str = "holdfast"
    ttl_s: float = 0.0
    deadline_s: float = 2.0
    ask_s: float = 0.25

    @property
    def addresses(self) -> list[str]:
        """Every address given."""
        return [self.address] if isinstance(self.address, str) else self.address


class MooncakeOptions(_Section, frozen=True, tag="mooncake", tag_field="kind"):
    """A Mooncake Store that already runs; times in seconds.

    `master`: tcp://HOST:PORT. `host`: this machine's address as the others see it, if not the one
    that reaches the master; `devices`: what `protocol: rdma` travels over. `lane`: the largest
    record; the tier needs four times that in memory.
    """

    master: str
    host: str = ""
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    lane: Size = Size(64 * MIB)
    prefix: str = "holdfast"
    deadline_s: float = 2.0
    ask_s: float = 0.25


TierOptions = HostOptions | CxlOptions | DiskOptions | PoolOptions | ValkeyOptions | MooncakeOptions


class DomainOptions(_Section, frozen=True):
    """A trust domain and where its key comes from: one of a file, a descriptor or a command.

    Each gives 32 bytes, as they are or as 64 hex digits. `key_fd` is the number of a descriptor
    that is open when the node starts; `key_command` prints the key, within `key_timeout_s`.
    `seal` None seals the domain's blocks below the host wherever that is possible. `public`: every
    other domain may read it, and only an engine that shows the secret in `publish_file` writes it.

    `quota_bytes`: the most it may hold, by tier; `reserved_bytes`: memory that is never taken from
    it, by tier. `share` is its weight beside the other domains': of memory that nobody reserved, of
    every tier's speed and of the node's threads. None is 1, and divides nothing where no domain has
    a share, a quota or a reservation. `users`: names or numbers of those, and only those, who may
    open a session in it; empty for the node's user and root.
    """

    key_file: str = ""
    key_fd: int | None = None
    key_command: list[str] = []
    key_timeout_s: float = 10.0
    seal: bool | None = None
    public: bool = False
    publish_file: str = ""
    quota_bytes: dict[str, Size] = {}
    reserved_bytes: dict[str, Size] = {}
    write_budget_bytes_per_day: Size | None = None
    share: float | None = None
    users: list[str | int] = []

    @property
    def divides(self) -> bool:
        """Whether anything is said about how much of the tiers is this domain's."""
        return bool(self.quota_bytes or self.reserved_bytes or self.share is not None)


class TlsOptions(_Section, frozen=True):
    """PEM files for TLS: this node's certificate, its key, and who signs the other side's."""

    cert: str
    key: str
    ca: str


class TokenOptions(_Section, frozen=True):
    """Tokens: what a target knows them by, and the one that this node shows.

    `key_file` holds 32 bytes, or 64 hex digits; `file` what `holdfast token` wrote last.
    """

    key_file: str = ""
    file: str = ""


class RegisterOptions(_Section, frozen=True):
    """How a target makes itself a member of a pool in etcd; times in seconds.

    `members` is what its clients' pool tier says: etcd://HOST:PORT[,HOST:PORT][/PREFIX], TLS files
    behind it included. Empty `id`: this host's name; empty `address`: where it listens. `weight` is
    its share beside the others' (its capacity in TiB, say). `drain_s`: how long it serves on after
    it was told to end.
    """

    members: str
    id: str = ""
    address: str = ""
    weight: float = 1.0
    zone: str = ""
    drain_s: float = 5.0


class ScrubOptions(_Section, frozen=True):
    """The background scrub: all that is stored is read and verified once in `every_s` seconds.

    0 turns it off. `rate` bounds what it reads, in bytes a second; 0: as fast as it has to.
    """

    every_s: float = WEEK_S
    rate: Size = Size(0)


class EngineOptions(_Section, frozen=True):
    """What an engine's connector wants to know.

    `deadline_s`: a fetch that takes longer is given up and recomputed. `save` False: only read.
    `model_digest`: pins the model's identity instead of deriving it from the model's files.
    """

    deadline_s: float = 5.0
    save: bool = True
    model_digest: str = ""


@prepared
class Config(_Section, frozen=True):
    """Everything a node, and an engine beside it, is told.

    `transport`: what records travel over between nodes: NIXL where both ends have it and RDMA
    (`auto`), wherever both ends have it (`nixl`), or TCP (`tcp`). `write`: copy new blocks to the
    next tier soon after (`behind`) or only when they must leave memory (`on_eviction`). `policy`:
    what leaves memory first. `plan`: fetch what brings the first token soonest (`best`), or
    whatever is held and can be there within the engine's deadline (`held`). `lease_s`: an engine
    that has not copied by then has lost its claim. `keyring`: the file with the domains' data keys,
    shared by the nodes of a pool; empty for one beside the first disk tier. `audit`: the log of
    what was done to keys; beside it if empty. `record`: a file to append every request's length,
    time and keys to; empty for none. `segment_blocks`: how many blocks of a chain lie together on
    one target of a pool, or server of a cluster; the same for all who share. `socket_group`: a
    group, by name or number, whose members may open the node's socket too; empty for its user
    alone.
    """

    listen: str | list[str]
    tiers: list[TierOptions]
    domains: dict[str, DomainOptions] = {}
    keyring: str = ""
    audit: str = ""
    record: str = ""
    write: Literal["behind", "on_eviction"] = "behind"
    policy: Literal["cost_aware", "leaf_lru", "s3fifo", "lirs"] = "cost_aware"
    plan: Literal["best", "held"] = "best"
    lease_s: float = LEASE_S
    engine: EngineOptions = EngineOptions()
    scrub: ScrubOptions = ScrubOptions()
    tls: TlsOptions | None = None
    tokens: TokenOptions = TokenOptions()
    register: RegisterOptions | None = None
    transport: Literal["auto", "nixl", "tcp"] = "auto"
    segment_blocks: int = SEGMENT_BLOCKS
    socket_group: str | int = ""

    @property
    def addresses(self) -> list[str]:
        """Every address this node listens on."""
        return [self.listen] if isinstance(self.listen, str) else self.listen

    @property
    def disk_folder(self) -> str:
        """The folder of the first disk tier, where a node keeps what it must remember; or empty."""
        return next((tier.path for tier in self.tiers if isinstance(tier, DiskOptions)), "")

    @property
    def tier_names(self) -> list[str]:
        """What each tier is called: its kind, and from the second below the host on a number."""
        kinds = [str(tier.__struct_config__.tag) for tier in self.tiers]
        return kinds[:2] + [f"{kind}{number}" for number, kind in enumerate(kinds[2:], start=1)]

    @property
    def keyring_file(self) -> str:
        """The key ring; empty where there is no place for one."""
        folder = self.disk_folder
        return self.keyring or (f"{folder}/{KEYRING_NAME}" if folder else "")

    @property
    def audit_file(self) -> str:
        """The audit log; empty where there is no place for one."""
        folder = self.disk_folder
        return self.audit or (f"{folder}/{AUDIT_NAME}" if folder else "")

    @property
    def shares(self) -> bool:
        """Whether some tier has records of other nodes too."""
        return any(
            not isinstance(tier, HostOptions | CxlOptions | DiskOptions) for tier in self.tiers
        )

    @property
    def node_address(self) -> str:
        """The Unix socket for engines of this machine; empty for a target and nothing else."""
        return next((address for address in self.addresses if not is_tcp(address)), "")

    @property
    def target_addresses(self) -> list[str]:
        """The TCP addresses for other nodes."""
        return [address for address in self.addresses if is_tcp(address)]
