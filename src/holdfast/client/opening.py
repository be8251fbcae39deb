"""`holdfast.open`: a store in this process, or the store of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from holdfast.assemble import open_here
from holdfast.client.session import NodeStore
from holdfast.errors import ConfigError
from holdfast.wire.address import UNIX, is_tcp

if TYPE_CHECKING:
    from holdfast.store.store import Store


@overload
def open_store(
    file: str = "",
    *,
    host: str | int | None = None,
    disk: str | int | None = None,
    path: str | None = None,
) -> Store: ...
@overload
def open_store(file: str, *, domain: str) -> NodeStore: ...
def open_store(
    file: str = "",
    *,
    host: str | int | None = None,
    disk: str | int | None = None,
    path: str | None = None,
    domain: str | None = None,
) -> Store | NodeStore:
    """Open a store: embedded in this process, or that of a node of this machine.

    `file` is a configuration file for an embedded store, or the address of a node,
    `unix:///path/node.sock`. Without it, the store is embedded: `host` and `disk` are capacities
    ("8 GiB" or bytes), and `path` is the folder of the disk tier, needed with `disk`. Without any
    of them, the defaults for this machine are taken, and logged the first time. `domain` is the
    domain of a node's sessions, by default "default". Use the store in a `with` block; the sessions
    of both kinds have the same methods and outcomes.

    Raises ConfigError for arguments that cannot be combined, BusyError for a folder in use, and
    NodeGoneError if no node answers.
    """
    if is_tcp(file):
        raise ConfigError(
            f"open: {file} is the address of a target, which serves other nodes; name the "
            f"{UNIX} socket of a node on this machine"
        )
    if file.startswith(UNIX):
        if not host is disk is path is None:
            raise ConfigError(
                f"open: {file} is a node, which has its own tiers; omit host, disk and path"
            )
        return NodeStore(file, "default" if domain is None else domain)
    if domain is not None:
        raise ConfigError(
            "open: domain needs the address of a node; pass the domain of an embedded store to "
            "store.session(fingerprint, domain)"
        )
    return open_here(file, host=host, disk=disk, path=path)
