"""The domains of a store: their secret keys, which of them are sealed, and the key ring."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from holdfast.assemble.keys import check_private, domain_key, read_key
from holdfast.blocks.key import DOMAIN_KEY_BYTES
from holdfast.codec.seal import missing
from holdfast.config import Config
from holdfast.errors import ConfigError, RefusedError
from holdfast.keys.audit import AuditLog
from holdfast.keys.keyring import KeyRing
from holdfast.regular_file import replace_file

DEFAULT_DOMAIN = "default"
DEFAULT_KEY_FILE = "default.key"


def configured_keys(config: Config) -> dict[str, bytes]:
    """Return the secret key of each configured domain.

    Call it before any file is opened: the number of a descriptor that the process was not started
    with must not belong to a file of the store.
    """
    keys: dict[str, bytes] = {}
    for name, domain in config.domains.items():
        key = domain_key(name, domain)
        for other, known in keys.items():
            if key == known:
                raise ConfigError(
                    f"domains.{name}: has the key of domains.{other}, so they would be one "
                    "domain; give each a key of its own"
                )
        keys[name] = key
    return keys


def default_key(config: Config) -> bytes:
    """Return the key of the default domain if none is configured.

    With a disk tier the key is kept in a file in the tier's folder, because blocks are found only
    with the key that they were saved with; otherwise it is new. Call it with the tiers open,
    because an open tier has locked its folder.
    """
    if not config.disk_folder:
        return secrets.token_bytes(DOMAIN_KEY_BYTES)
    file = Path(config.disk_folder, DEFAULT_KEY_FILE)
    if not os.path.lexists(file):
        replace_file(file, secrets.token_bytes(DOMAIN_KEY_BYTES))
    return read_key(file, "domains.default")


def restore_default_key(config: Config, keys: Mapping[str, bytes]) -> None:
    """Write the default domain's key beside the blocks again, on a drive that has replaced another.

    Without it the next start would make another key, and find none of the blocks. The drive keeps a
    key that it has.
    """
    file = Path(config.disk_folder, DEFAULT_KEY_FILE)
    if config.disk_folder and DEFAULT_DOMAIN not in config.domains and not os.path.lexists(file):
        replace_file(file, keys[DEFAULT_DOMAIN])


def publisher(config: Config, keys: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return the public domain's name and the secret that permits writes there; empty without one.

    Raises ConfigError if the secret is a domain's key, because that domain's engines, or with the
    public domain's own key all engines, could publish.
    """
    for name, domain in config.domains.items():
        if domain.public:
            setting = f"domains.{name}.publish_file"
            secret = read_key(Path(domain.publish_file), setting)
            for other, key in keys.items():
                if secret == key:
                    readers = "all engines" if other == name else "the engines of that domain"
                    raise ConfigError(
                        f"{setting}: {domain.publish_file!r} has the key of domains.{other}, which "
                        f"{readers} have, so they could publish; give it a secret of its own"
                    )
            return name, secret
    return "", b""


def domain_secret(config: Config, name: str) -> bytes:
    """Return the secret key of a domain, for a command beside a node; raise ConfigError if none.

    That of the default domain, if no key is configured, is in a file that the node's start makes.
    """
    if name in config.domains:
        return domain_key(name, config.domains[name])
    file = Path(config.disk_folder, DEFAULT_KEY_FILE)
    if name == DEFAULT_DOMAIN and config.disk_folder and os.path.lexists(file):
        return read_key(file, "domains.default")
    known = ", ".join(sorted(config.domains)) or "none"
    raise ConfigError(
        f"domain {name!r} has no key here; configured are: {known}; name the node's configuration "
        "with --config"
    )


def sealed_domains(config: Config) -> list[str]:
    """Return the domains whose blocks are sealed: with a configured key and not `seal: false`.

    Raises ConfigError if the sealing library is not installed and blocks would leave memory,
    because such blocks are never written unsealed. The generated key of the default domain seals
    nothing: it is stored beside the blocks, so it would not protect them.
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
                f"memory for a lower tier or another node; {lack}, or set domains.{name}.seal: "
                "false to write them unsealed"
            )
    return []


def open_ring(config: Config, keys: dict[str, bytes], audit: AuditLog) -> KeyRing | None:
    """Return the key ring with every sealed domain enrolled; None if no domain is sealed.

    Raises ConfigError or FormatError for a key ring that cannot be used, and leaves it unchanged.
    """
    sealed = sealed_domains(config)
    if not sealed:
        return None
    ring = read_ring(config)
    for name in sealed:
        try:
            changed = ring.enrol(name, keys[name])
        except RefusedError as error:
            raise ConfigError(str(error)) from error
        if changed:
            audit.record("key", domain=name, change=changed)
    return ring


def read_ring(config: Config) -> KeyRing:
    """Read the configured key ring; raise ConfigError or FormatError if it cannot be used.

    With a sealed public domain, other users must not be able to open the file: every engine has
    the secret that unwraps this domain's data keys, and with these it could forge public blocks.
    """
    path = Path(config.keyring_file) if config.keyring_file else None
    public = any(domain.public and domain.seal is not False for domain in config.domains.values())
    try:
        ring = KeyRing(path, derives=config.shares and not config.keyring)
        if public and path is not None and path.exists():
            check_private(path, path.stat().st_mode, "keyring")
    except OSError as error:
        raise ConfigError(
            f"keyring: {config.keyring_file!r} cannot be read: {error.strerror}; correct it"
        ) from error
    return ring
