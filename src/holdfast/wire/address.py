"""Where a node listens, as text: `unix:///path/to/node.sock`, or the bare path."""

from __future__ import annotations

from holdfast.errors import ConfigError

UNIX = "unix://"
UNIX_PATH_BYTES_MAX = 107
"""What the kernel allows for the path of a Unix socket."""


def socket_path(address: str) -> str:
    """Return the path of a Unix socket; raise ConfigError for any other kind of address."""
    path = address.removeprefix(UNIX)
    if not path.startswith("/"):
        raise ConfigError(
            f"node address {address!r} is not unix:// and an absolute path, "
            "such as unix:///run/holdfast/node.sock"
        )
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"node address {address!r}: the path has {len(path.encode())} bytes, a Unix socket "
            f"allows {UNIX_PATH_BYTES_MAX}; choose a shorter folder"
        )
    return path
