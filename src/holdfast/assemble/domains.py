"""The domains of a store: their secrets, which of them are sealed, and the ring with their keys."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from holdfast.assemble.keys import domain_key, read_key
from holdfast.blocks.key import DOMAIN_KEY_BYTES
from holdfast.codec.seal import missing
from holdfast.config import Config
from holdfast.errors import ConfigError, RefusedError
from holdfast.store.audit import AuditLog
from holdfast.store.keyring import KeyRing

DEFAULT_DOMAIN = "default"
DEFAULT_KEY_FILE = "default.key"


def configured_keys(config: Config) -> dict[str, bytes]:
    """Return the key of each domain that is configured, from where it says.

    Called before anything is opened: a descriptor that the process was not started with is free
    then, and not a file of ours.
    """
    keys: dict[str, bytes] = {}
    for name, domain in config.domains.items():
        key = domain_key(name, domain)
        for other, known in keys.items():
            if key == known:
                raise ConfigError(
                    f"domains.{name}: has the key of domains.{other}, so it would be the same "
                    "domain; give each a key of its own"
                )
        keys[name] = key
    return keys


def default_key(config: Config) -> bytes:
    """Return the key of the default domain where none is configured; a node with a disk keeps it.

    Called with the tiers open: their folders are ours then.
    """
    folder = config.disk_folder
    if folder:
        return _kept_key(Path(folder, DEFAULT_KEY_FILE))
    return secrets.token_bytes(DOMAIN_KEY_BYTES)


def sealed_domains(config: Config) -> list[str]:
    """Return the domains whose blocks are sealed: those with a key of their own, unless told else.

    Raises ConfigError where that is not installed and blocks would leave memory: what is to be
    sealed is never written otherwise. A key that lies beside the blocks would protect them from
    nobody, so the key that we make ourselves seals nothing.
    """
    wanted = [name for name, domain in config.domains.items() if domain.seal is not False]
    lack = missing() if wanted else ""
    if not lack:
        return wanted
    leave = len(config.tiers) > 1 or bool(config.target_addresses)
    for name in wanted:
        if config.domains[name].seal or leave:
            raise ConfigError(
                f"domains.{name}: has a key of its own, so its blocks are sealed when they leave "
                f"memory, for a tier below or another node; {lack}, or say domains.{name}.seal: "
                "false to have them leave as they are"
            )
    return []


def open_ring(config: Config, keys: dict[str, bytes], audit: AuditLog) -> KeyRing | None:
    """Return the key ring with the domains that are sealed on it; None where none is.

    Raises ConfigError or FormatError for a ring that can not be used, and leaves it as it is.
    """
    sealed = sealed_domains(config)
    if not sealed:
        return None
    derives = config.shares and not config.keyring
    try:
        ring = KeyRing(Path(config.keyring_file) if config.keyring_file else None, derives=derives)
    except OSError as error:
        raise ConfigError(
            f"keyring: {config.keyring_file!r} can not be read: {error.strerror}; correct it"
        ) from error
    for name in sealed:
        try:
            changed = ring.enrol(name, keys[name])
        except RefusedError as error:
            raise ConfigError(str(error)) from error
        if changed:
            audit.record("key", domain=name, change=changed)
    return ring


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
