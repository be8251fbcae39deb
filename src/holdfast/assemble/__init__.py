"""Configuration to running store: the one place that picks implementations."""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.assemble.domains import DEFAULT_DOMAIN, configured_keys, default_key, open_ring
from holdfast.assemble.keys import read_key
from holdfast.assemble.rules import choose_rules, divide
from holdfast.config import (
    Config,
    CxlOptions,
    DiskOptions,
    HostOptions,
    MooncakeOptions,
    PoolOptions,
    ValkeyOptions,
    default_address,
    load,
    parse,
)
from holdfast.errors import ConfigError
from holdfast.plan.planner import BestCut, FetchHeld
from holdfast.policy.choice import POLICIES
from holdfast.store.audit import AuditLog
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.disk.file import DiskConfig, check_file
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.throttle import Throttled

LEARNT_FILE = "learnt.json"


def open_store(config: Config) -> Store:
    """Open every tier and start the store; the caller closes it.

    Raises ConfigError, FormatError or BusyError and leaves what is on the media as it was.
    """
    keys = configured_keys(config)
    with contextlib.ExitStack() as undo:
        lower: list[Tier] = []
        for number, options in enumerate(config.tiers):
            if not isinstance(options, HostOptions):
                lower.append(_tier(config, options, number, config.tier_names[number]))
                undo.callback(lower[-1].close)
        host_bytes = next(tier.capacity for tier in config.tiers if isinstance(tier, HostOptions))
        if DEFAULT_DOMAIN not in keys:
            keys[DEFAULT_DOMAIN] = default_key(config)
        audit = AuditLog(Path(config.audit_file) if config.audit_file else None)
        ring = open_ring(config, keys, audit)
        eviction = POLICIES[config.policy]()
        planner = BestCut() if config.plan == "best" else FetchHeld()
        store = Store(host_bytes, lower, keys, eviction=eviction, planner=planner)
        store.audit = audit
        store.states.segment_blocks = config.segment_blocks
        if ring is not None:
            store.seal_with(ring)
        for name, domain in config.domains.items():
            if domain.public:
                token = read_key(Path(domain.publish_file), f"domains.{name}.publish_file")
                store.publish_to(name, token)
        choose_rules(store, config)
        divide(store, config)
        store.lease_s = config.lease_s
        store.scrubber.every_s, store.scrubber.rate = config.scrub.every_s, config.scrub.rate
        store.write_behind = config.write == "behind"
        if config.target_addresses:
            store.take_foreign()
        folder = next((t.path for t in config.tiers if isinstance(t, DiskOptions)), None)
        if folder is not None:
            store.keep_learnt(Path(folder, LEARNT_FILE))
        store.start()
        undo.pop_all()
    return store


def open_here(
    file: str = "",
    *,
    host: str | int | None = None,
    disk: str | int | None = None,
    path: str | None = None,
) -> Store:
    """Open a store in this process: from a configuration file, or from a few sizes.

    `host` and `disk` are capacities ("8 GiB" or bytes); `path` is the folder of the disk tier,
    needed with `disk`. With nothing given, what suits this machine. Use it in a `with` block.
    """
    if host is None and disk is None:
        return open_store(load(file))
    if file:
        raise ConfigError("open: give a file or sizes, not both")
    if (disk is None) != (path is None):
        raise ConfigError("open: disk and path go together; give both or neither")
    tiers: list[dict[str, object]] = [{"kind": "host", "capacity": host or "256 MiB"}]
    if disk is not None:
        tiers.append({"kind": "disk", "path": path, "capacity": disk})
    return open_store(parse({"listen": default_address(), "tiers": tiers}))


def _tier(
    config: Config,
    options: CxlOptions | DiskOptions | PoolOptions | ValkeyOptions | MooncakeOptions,
    number: int,
    name: str,
) -> Tier:
    """Open one tier below the host."""
    match options:
        case CxlOptions():
            from holdfast.assemble.cxl import open_cxl

            return open_cxl(options, f"tiers.{number}", name)
        case DiskOptions():
            disk = DiskTier(_disk_config(options, number, name))
            return Throttled(disk, options.read_limit) if options.read_limit else disk
        case PoolOptions():
            from holdfast.assemble.pool import open_pool

            return open_pool(config, options, f"tiers.{number}", name)
        case ValkeyOptions():
            from holdfast.assemble.existing import open_valkey

            return open_valkey(options, f"tiers.{number}", name, config.segment_blocks)
        case MooncakeOptions():
            from holdfast.assemble.existing import open_mooncake

            return open_mooncake(options, f"tiers.{number}", name)


def check_disk(options: DiskOptions, number: int, name: str) -> None:
    """Raise ConfigError or FormatError where a disk tier's file would be refused; changes nothing.

    A node may have it open meanwhile.
    """
    check_file(_disk_config(options, number, name))


def _disk_config(options: DiskOptions, number: int, name: str) -> DiskConfig:
    return DiskConfig(
        path=options.path,
        capacity_bytes=options.capacity,
        region_bytes=options.region,
        setting=f"tiers.{number}",
        name=name,
    )
