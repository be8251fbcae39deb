"""Configuration to running store: the one place that picks implementations."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from holdfast.assemble.rules import choose_rules
from holdfast.blocks.key import DOMAIN_KEY_BYTES
from holdfast.config import (
    Config,
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
from holdfast.policy.choice import POLICIES
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.disk import DiskTier
from holdfast.tiers.disk_file import DiskConfig

DEFAULT_DOMAIN = "default"
DEFAULT_KEY_FILE = "default.key"
LEARNT_FILE = "learnt.json"


def open_store(config: Config) -> Store:
    """Open every tier and start the store; the caller closes it.

    Raises ConfigError, FormatError or BusyError and leaves what is on the media as it was.
    """
    with contextlib.ExitStack() as undo:
        lower: list[Tier] = []
        for number, options in enumerate(config.tiers):
            if not isinstance(options, HostOptions):
                lower.append(_tier(config, options, number, f"{len(lower)}" if lower else ""))
                undo.callback(lower[-1].close)
        host_bytes = next(tier.capacity for tier in config.tiers if isinstance(tier, HostOptions))
        eviction = POLICIES[config.policy]()
        store = Store(host_bytes, lower, _domains(config), eviction=eviction)
        choose_rules(store, config)
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
    options: DiskOptions | PoolOptions | ValkeyOptions | MooncakeOptions,
    number: int,
    rest: str,
) -> Tier:
    """Open one tier below the host; `rest` tells tiers of one kind apart."""
    match options:
        case DiskOptions():
            return DiskTier(
                DiskConfig(
                    path=options.path,
                    capacity_bytes=options.capacity,
                    region_bytes=options.region,
                    setting=f"tiers.{number}",
                    name=f"disk{rest}",
                )
            )
        case PoolOptions():
            from holdfast.assemble.pool import open_pool

            return open_pool(config, options, f"tiers.{number}", f"pool{rest}")
        case ValkeyOptions():
            from holdfast.assemble.existing import open_valkey

            return open_valkey(options, f"tiers.{number}", f"valkey{rest}")
        case MooncakeOptions():
            from holdfast.assemble.existing import open_mooncake

            return open_mooncake(options, f"tiers.{number}", f"mooncake{rest}")


def _domains(config: Config) -> dict[str, bytes]:
    """Return the key of each domain. Called with the tiers open: their folders are ours then."""
    keys = {
        name: read_key(Path(domain.key_file), f"domains.{name}.key_file")
        for name, domain in config.domains.items()
    }
    if DEFAULT_DOMAIN not in keys:
        folder = next((t.path for t in config.tiers if isinstance(t, DiskOptions)), None)
        if folder is None:
            keys[DEFAULT_DOMAIN] = secrets.token_bytes(DOMAIN_KEY_BYTES)
        else:
            keys[DEFAULT_DOMAIN] = _kept_key(Path(folder, DEFAULT_KEY_FILE))
    return keys


def read_key(file: Path, setting: str) -> bytes:
    """Return the 32 secret bytes in a file; `setting` names it in the ConfigError otherwise."""
    try:
        with file.open("rb") as opened:
            exposed = os.fstat(opened.fileno()).st_mode & 0o077
            data = opened.read(2 * DOMAIN_KEY_BYTES + 2)
    except OSError as error:
        raise ConfigError(
            f"{setting}: {str(file)!r} can not be read: {error.strerror}; "
            f"make it with: (umask 077; head -c {DOMAIN_KEY_BYTES} /dev/urandom > FILE)"
        ) from error
    if exposed:
        raise ConfigError(f"{setting}: {str(file)!r} is open to other users; chmod 600 it")
    if len(data) == DOMAIN_KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != DOMAIN_KEY_BYTES:
        raise ConfigError(
            f"{setting}: {str(file)!r} holds no key; it must hold {DOMAIN_KEY_BYTES} bytes "
            f"or {2 * DOMAIN_KEY_BYTES} hex digits"
        )
    return key


def _kept_key(file: Path) -> bytes:
    """Return the default domain's key, made at the first start; without it no block is found."""
    if not file.exists():
        made = file.with_name(file.name + ".new")
        made.unlink(missing_ok=True)
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, secrets.token_bytes(DOMAIN_KEY_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        made.rename(file)
    return read_key(file, "domains.default")
