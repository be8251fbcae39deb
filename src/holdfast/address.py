"""Addresses as text: `unix:///path/to/node.sock`, a bare path, or `tcp://host:port`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import ConfigError

UNIX = "unix://"
TCP = "tcp://"
UNIX_PATH_BYTES_MAX = 107
"""What the kernel allows for the path of a Unix socket."""

PORT_MAX = 65_535

_TCP = re.compile(
    r"tcp://(?:\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})"
)

_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}")


class HostPort(NamedTuple):
    """A TCP endpoint; an IPv6 host comes without its brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; a name counts only if it is `localhost`."""
        if not self.is_numeric:
            return self.host == "localhost"
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it is the wildcard address (0.0.0.0 or ::): to listen on, not to connect to."""
        return self.is_numeric and ipaddress.ip_address(self.host).is_unspecified

    @property
    def is_numeric(self) -> bool:
        """Whether the host is an address and no name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def socket_path(address: str) -> str:
    """Return the path of a Unix socket; raise ConfigError for any other kind of address."""
    if is_tcp(address):
        raise target_named_error(address)
    path = address.removeprefix(UNIX)
    try:
        nbytes = len(path.encode())
    except UnicodeEncodeError:
        nbytes = -1
    if nbytes < 0 or "\0" in path:
        raise ConfigError(f"node address {address!a:.300} cannot name a socket; correct it")
    if not path.startswith("/"):
        raise ConfigError(
            f"node address {address!r} is not unix:// and an absolute path, "
            "such as unix:///run/holdfast/node.sock"
        )
    if nbytes > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"node address {address!r}: the path has {nbytes} bytes, a Unix socket "
            f"allows {UNIX_PATH_BYTES_MAX}; choose a shorter folder"
        )
    return path


def target_named_error(address: str) -> ConfigError:
    """Return the error for a target's address in the place of a node's."""
    return ConfigError(
        f"node address {address!r:.300} is that of a pool's target, which serves other nodes; name "
        "a node on this machine, such as unix:///run/holdfast/node.sock"
    )


def is_host_and_port(address: str) -> bool:
    """Whether an address is `host:port` without `tcp://`."""
    return _HOST_AND_PORT.fullmatch(address) is not None


def is_tcp(address: str) -> bool:
    """Whether an address means a target, and not the socket of a node on this machine."""
    return address.startswith(TCP)


def tcp_endpoint(address: str, port_min: int = 0) -> HostPort:
    """Return host and port of `tcp://host:port` or `tcp://[v6]:port`; raises ConfigError.

    Port 0 is any free one, for a listener; a `port_min` of 1 refuses it.
    """
    found = _TCP.fullmatch(address)
    port = int(found[3]) if found else -1
    if found is None or not port_min <= port <= PORT_MAX:
        raise ConfigError(
            f"address {address!r:.300} is not tcp://host:port, such as "
            "tcp://10.0.0.7:7441 or tcp://[fd00::7]:7441"
        )
    return HostPort(found[1] or found[2], port)


def tcp_address(host: str, port: int) -> str:
    """Return `tcp://host:port`, with brackets around an IPv6 address."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def page_url(page: str, address: str) -> str:
    """Return the URL of a status page at `page`, as seen by a host that connects to `address`.

    Both are tcp:// addresses. A wildcard host of `page` means the host of `address`. Empty if there
    is no page, or none that this host can reach.
    """
    try:
        target, found = tcp_endpoint(address), tcp_endpoint(page, port_min=1)
    except ConfigError:
        return ""
    if found.is_loopback and not target.is_loopback:
        return ""
    host = target.host if found.is_wildcard else found.host
    return f"http://{tcp_address(host, found.port).removeprefix(TCP)}/"


def exposed_addresses(addresses: Sequence[str]) -> list[str]:
    """Return those of a node's addresses that other machines can reach.

    Raises ConfigError for an invalid address, an empty list, or more than one Unix socket.
    """
    for address in addresses:
        if not address.startswith((UNIX, TCP, "/")):
            raise ConfigError(
                f"address {address!r:.300} is neither unix:///path nor tcp://host:port; write one "
                "of them"
            )
    local = [socket_path(address) for address in addresses if not is_tcp(address)]
    if not addresses or len(local) > 1:
        raise ConfigError(
            f"{len(addresses)} addresses, {len(local)} of them Unix sockets; name at least one "
            "address, and one unix:// at most"
        )
    distant = [address for address in addresses if is_tcp(address)]
    return [address for address in distant if not tcp_endpoint(address).is_loopback]
