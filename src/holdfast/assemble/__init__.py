"""Build a running store from its configuration: the only code that selects implementations."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path

from holdfast.assemble.domains import DEFAULT_DOMAIN, configured_keys, default_key, open_ring
from holdfast.assemble.keys import read_key
from holdfast.assemble.opening import Opening
from holdfast.assemble.rules import quotas, tier_rules
from holdfast.config import (
    Config,
    DiskOptions,
    HostOptions,
    default_address,
    kind_and_options,
    load,
    parse,
)
from holdfast.errors import ConfigError
from holdfast.keys.audit import AuditLog
from holdfast.plan.planner import BestCut, FetchHeld
from holdfast.policy.choice import POLICIES
from holdfast.store.call_threads import CallThreads, DirectCalls, OwnThreadCalls
from holdfast.store.options import StoreOptions
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.disk.file import FILE_NAME
from holdfast.tiers.kind import TierContext, TierKind, TierSection
from holdfast.wire.remote.credentials import Credentials, TlsFiles

_log = logging.getLogger(__name__)

ESTIMATES_FILE = "learnt.json"
"""Name of the file with the saved estimates, in the folder of the first disk tier."""

HOST_DEFAULT = "256 MiB"
"""Host memory of `open_here` if only a disk tier is given."""


def open_store(config: Config, calls: CallThreads | None = None) -> Store:
    """Open every tier and start the store; the caller closes it.

    `calls`: the threads that run the store's calls; by default the callers' own. Raises
    ConfigError, FormatError or BusyError, and then leaves the tiers' media unchanged.
    """
    keys = configured_keys(config)
    with contextlib.ExitStack() as undo:
        lower: list[Tier] = []
        for number, section in enumerate(config.tiers):
            if not isinstance(section, HostOptions):
                kind, options, context = configured_tier(config, number)
                lower.append(kind.open(options, context))
                undo.callback(lower[-1].close)
        if DEFAULT_DOMAIN not in keys:
            keys[DEFAULT_DOMAIN] = default_key(config)
        audit = AuditLog(Path(config.audit_file) if config.audit_file else None)
        ring = open_ring(config, keys, audit)
        public_domain, publish_token = "", b""
        for name, domain in config.domains.items():
            if domain.public:
                public_domain = name
                publish_token = read_key(Path(domain.publish_file), f"domains.{name}.publish_file")
        folder = config.disk_folder
        store_options = StoreOptions(
            planner=BestCut() if config.plan == "best" else FetchHeld(),
            make_eviction=POLICIES[config.policy],
            quotas=quotas(config),
            rules=tier_rules(config, keys),
            ring=ring,
            audit=audit,
            public_domain=public_domain,
            publish_token=publish_token,
            serves_peers=bool(config.target_addresses),
            writes_behind=config.write == "behind",
            lease_s=config.lease_s,
            segment_blocks=config.segment_blocks,
            scrub_every_s=config.scrub.every_s,
            scrub_bytes_per_s=config.scrub.rate,
            estimates_file=Path(folder, ESTIMATES_FILE) if folder else None,
            calls=calls or DirectCalls(),
        )
        store = Store(config.host_bytes, lower, keys, store_options)
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
    needed with `disk`. Without arguments, the defaults for this machine. Use the store in a `with`
    block. Raises ConfigError for arguments that cannot be combined.

    A thread opens the store while the caller waits. If an exception interrupts the caller (Ctrl-C,
    a signal handler that raises), that thread closes the store.
    """
    return Opening(partial(_open_here, file, host, disk, path)).result()


def _open_here(
    file: str, host: str | int | None, disk: str | int | None, path: str | None
) -> Store:
    if host is None and disk is None and path is None:
        config = load(file)
        if not file:
            disks = [tier for tier in config.tiers if isinstance(tier, DiskOptions)]
            if disks and not any(Path(disk.path, FILE_NAME).exists() for disk in disks):
                _log.warning(
                    "no capacity given: taking %s of memory, and %s of disk in %s; give others as "
                    'holdfast.open(host="8 GiB", disk="64 GiB", path="/var/lib/holdfast")',
                    *(config.host_bytes, disks[0].capacity, disks[0].path),
                )
        return open_store(config, OwnThreadCalls())
    if file:
        raise ConfigError("open: give a file or sizes, not both")
    if (disk is None) != (path is None):
        raise ConfigError(
            "open: disk and path go together; give the disk tier's capacity and its folder, or "
            "neither"
        )
    if path == "":
        raise ConfigError("open: path is empty; name the folder of the disk tier")
    tiers: list[dict[str, object]] = [
        {"kind": "host", "capacity": HOST_DEFAULT if host is None else host}
    ]
    if disk is not None:
        tiers.append({"kind": "disk", "path": path, "capacity": disk})
    config = parse({"listen": default_address(), "tiers": tiers})
    return open_store(config, OwnThreadCalls())


def configured_tier(config: Config, number: int) -> tuple[TierKind, TierSection, TierContext]:
    """Return the kind, options and context of tier `number`, which is not the host tier."""
    at, tls = f"tiers.{number}", config.tls
    kind, options = kind_and_options(config.tiers[number], at)
    files = TlsFiles(tls.cert, tls.key, tls.ca) if tls else None
    context = TierContext(
        at,
        config.tier_names[number],
        config.segment_blocks,
        Credentials(files, config.tokens.file, config.open),
        config.transport,
    )
    return kind, options, context
