"""Pool members from DNS: the addresses of a host name, or the SRV records of a service.

    pool.example.org:7070        every A and AAAA record is a member, named by its address
    _holdfast._tcp.example.org   every SRV record is a member, named by its host and port, and
                                 weighted; only the records of the lowest priority count

With SRV records a member keeps its name, and therefore its segments, when its address changes. A
name that resolves to nothing is an error, and the last view stays. A name server may return a
subset of the records each time, if every member is returned at least once in `dead_after_s`.

SRV records (RFC 2782) are looked up with dnspython, which the extra `dns` installs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.address import TCP, tcp_address, tcp_endpoint
from holdfast.errors import ConfigError, MembershipError
from holdfast.membership.member_list import MEMBERS_MAX, WEIGHT_MAX, read_member
from holdfast.membership.poller import PolledSource

LOOK_S = 5.0
"""Time between two queries."""


class SrvRecord(NamedTuple):
    """One server of a service. Records of the lowest priority are used, in shares of `weight`."""

    priority: int
    weight: int
    port: int
    host: str


def lookup_srv(
    name: str, servers: Sequence[tuple[str, int]] = (), timeout_s: float = 3.0
) -> list[SrvRecord]:
    """Return the SRV records of a full name, within `timeout_s` seconds.

    `servers` are the (address, port) of name servers, by default those of the system. Raises
    MembershipError if none of them answers with records, or if dnspython is not installed.
    """
    try:
        from dns import exception
        from dns.resolver import Resolver
    except ImportError as error:
        raise MembershipError(
            f"SRV records of {name}: dnspython is not installed; pip install 'holdfast-kv[dns]'"
        ) from error
    try:
        resolver = Resolver(configure=not servers)
        if servers:
            resolver.nameservers = [address for address, _ in servers]
            resolver.nameserver_ports = dict(servers)
        found = resolver.resolve(name, "SRV", lifetime=timeout_s, search=False)
    except (exception.DNSException, OSError, UnicodeError) as error:
        raise MembershipError(
            f"SRV records of {name!r:.300}: {error}; check the name and the name server"
        ) from error
    return [
        SrvRecord(each.priority, each.weight, each.port, each.target.to_text(omit_final_dot=True))
        for each in found
    ]


def system_addresses(host: str) -> list[str]:
    """Return the IPv4 and IPv6 addresses of a host name; raises MembershipError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MembershipError(f"{host}: {error}; check the name") from error
    return [str(address[0]) for *_, address in found]


class DnsSource(PolledSource):
    """A `MembershipSource` that queries DNS every `look_s`.

    `name` is `host:port`, or a name that starts with `_` for SRV records. `addresses` and
    `services` replace the system's resolvers in tests.
    """

    def __init__(
        self,
        name: str,
        look_s: float = LOOK_S,
        addresses: Callable[[str], Sequence[str]] = system_addresses,
        services: Callable[[str], Sequence[SrvRecord]] = lookup_srv,
    ) -> None:
        self._name = name
        self._host, self._port = name, 0
        if not name.startswith("_"):
            try:
                self._host, self._port = tcp_endpoint(f"{TCP}{name}", port_min=1)
            except ConfigError as error:
                raise MembershipError(
                    f"{name!r:.300} is not a name for DNS; write host:port or _service._tcp.domain"
                ) from error
        self._addresses = addresses
        self._services = services
        super().__init__(f"members in DNS {name}", look_s, look_s)

    def _one_round(self) -> None:
        if self._port:
            names = sorted({tcp_address(host, self._port) for host in self._addresses(self._host)})
            found: list[dict[str, object]] = [
                {"id": name.removeprefix(TCP), "address": name} for name in names
            ]
        else:
            records = self._services(self._host)
            first = min((record.priority for record in records), default=0)
            used = {f"{one.host}:{one.port}": one for one in records if one.priority == first}
            found = [
                {
                    "id": member_id,
                    "address": tcp_address(record.host, record.port),
                    "weight": float(min(max(record.weight, 1), WEIGHT_MAX)),
                }
                for member_id, record in sorted(used.items())
            ]
        members = [read_member(each, self._name) for each in found]
        if not 0 < len(members) <= MEMBERS_MAX:
            raise MembershipError(
                f"{self._name}: {len(members)} members, not 1 to {MEMBERS_MAX}; check the records"
            )
        self._tell(members)
