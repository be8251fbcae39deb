"""Checks by `doctor` of what `serve` reads at its start: keys, tokens, TLS files, users, logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from holdfast.assemble.domains import (
    DEFAULT_DOMAIN,
    DEFAULT_KEY_FILE,
    configured_keys,
    read_ring,
)
from holdfast.assemble.keys import check_descriptors, read_key
from holdfast.config import Config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.finding import Finding, problem
from holdfast.node.local.users import group_of, users_of
from holdfast.wire.remote.credentials import TlsFiles, server_context


def rehearse(config: Config) -> Iterator[Finding]:
    """Check the files and commands of the configuration that a node uses at its start.

    Changes nothing. Keys are read, and their commands are run, because only that shows whether
    they are available.
    """
    own = "configured" if DEFAULT_DOMAIN in config.domains else "the node's own"
    others = [name for name in config.domains if name != DEFAULT_DOMAIN]
    domains = ", ".join([f"{DEFAULT_DOMAIN}: {own}", *others])
    yield _tried("keys", domains, lambda: _try_keys(config))
    ring = config.keyring_file
    if ring:  # the node creates a file that is missing
        yield _tried("key ring", ring, lambda: Path(ring).exists() and read_ring(config))
    if config.tokens.key_file:
        file = config.tokens.key_file
        yield _tried("tokens", file, partial(_try_key, file, "tokens.key_file"))
    if config.tls:
        files = TlsFiles(config.tls.cert, config.tls.key, config.tls.ca)
        yield _tried("tls", files.cert, lambda: server_context(files))
    if config.socket_group or any(domain.users for domain in config.domains.values()):
        yield _tried("users", "known to this machine", lambda: (users_of(config), group_of(config)))
    for name, target in (("record", config.record), ("audit", config.audit)):
        if target:
            yield _tried(name, target, partial(_appends, name, target))


def _tried(what: str, found: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except HoldfastError as error:
        return problem(what, found, str(error))
    except OSError as error:  # e.g. a folder of the path that this user may not enter
        return problem(
            what, found, f"{error.filename}: {error.strerror}; run this command as the node's user"
        )
    return Finding(what, found, ok=True)


def _try_keys(config: Config) -> None:
    check_descriptors(config)
    for name, domain in config.domains.items():
        if domain.key_file:
            _check_file(domain.key_file, f"domains.{name}.key_file")
    configured_keys(config)
    for name, domain in config.domains.items():
        if domain.publish_file:
            _try_key(domain.publish_file, f"domains.{name}.publish_file")
    kept = Path(config.disk_folder, DEFAULT_KEY_FILE)
    if DEFAULT_DOMAIN not in config.domains and config.disk_folder and kept.exists():
        read_key(kept, f"domains.{DEFAULT_DOMAIN}")


def _try_key(file: str, setting: str) -> None:
    _check_file(file, setting)
    read_key(Path(file), setting)


def _check_file(file: str, setting: str) -> None:
    """Raise ConfigError for a pipe: it can be read only once, and the node must read it."""
    if Path(file).is_fifo():
        raise ConfigError(f"{setting}: {file!r} is a pipe, which only `serve` may read; not tried")


def _appends(name: str, target: str) -> None:
    """Raise ConfigError if a file cannot be appended to or created."""
    file, folder = Path(target), Path(target).parent
    why = ""
    if not folder.is_dir():
        why = f"there is no folder {str(folder)!r}; create it"
    elif file.is_dir():
        why = "it is a folder; name a file in it"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        why = f"user {os.geteuid()} has no permission; chown it, or name another file"
    if why:
        raise ConfigError(f"{name}: {target!r} cannot be written: {why}")
