"""Pool members from DNS: the addresses of a host name, or the SRV records of a service.

    pool.example.org:7070        every A and AAAA record is a member, named by its address
    _holdfast._tcp.example.org   every SRV record is a member, named by its host and port, and
                                 weighted; only the records of the lowest priority count

With SRV records a member keeps its name, and therefore its segments, when its address changes. A
name that resolves to nothing is an error, and the last view stays. A name server may return a
subset of the records each time, if every member is returned at least once in `dead_after_s`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from holdfast.errors import MembershipError
from holdfast.membership.dns_srv import SrvRecord, lookup_srv
from holdfast.membership.member_list import MEMBERS_MAX, TCP, read_member, tcp_address
from holdfast.membership.members import Member
from holdfast.membership.poller import Poller

LOOK_S = 5.0
"""Time between two queries."""


class DnsSource:
    """A `MembershipSource` that queries DNS every `look_s`.

    `name` is `host:port`, or a name that starts with `_` for SRV records. `addresses` and
    `services` replace the system's resolvers in tests.
    """

    def __init__(
        self,
        name: str,
        look_s: float = LOOK_S,
        addresses: Callable[[str], Sequence[str]] | None = None,
        services: Callable[[str], Sequence[SrvRecord]] = lookup_srv,
    ) -> None:
        self._name = name
        self._host, self._port = (name, 0) if name.startswith("_") else _split(name)
        self._addresses = addresses or system_addresses
        self._services = services
        self._on_members: Callable[[Sequence[Member]], None] | None = None
        self._poller = Poller(f"members in DNS {name}", self._look, look_s, look_s)

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        self._on_members = told
        self._poller.start()

    def trouble(self) -> str:
        return self._poller.trouble

    def close(self) -> None:
        self._poller.close()

    def _look(self) -> None:
        members = self._from_addresses() if self._port else self._from_services()
        if not 0 < len(members) <= MEMBERS_MAX:
            raise MembershipError(
                f"{self._name}: {len(members)} members, not 1 to {MEMBERS_MAX}; check the records"
            )
        if self._on_members is not None:
            self._on_members(members)

    def _from_addresses(self) -> list[Member]:
        names = sorted({tcp_address(host, self._port) for host in self._addresses(self._host)})
        return [
            read_member({"id": name.removeprefix(TCP), "address": name}, self._name)
            for name in names
        ]

    def _from_services(self) -> list[Member]:
        records = self._services(self._host)
        first = min((record.priority for record in records), default=0)
        found = {
            f"{record.host}:{record.port}": record for record in records if record.priority == first
        }
        return [
            read_member(
                {
                    "id": member_id,
                    "address": tcp_address(record.host, record.port),
                    "weight": float(min(max(record.weight, 1), 10_000)),
                },
                self._name,
            )
            for member_id, record in sorted(found.items())
        ]


def system_addresses(host: str) -> list[str]:
    """Return the IPv4 and IPv6 addresses of a host name; raises MembershipError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise MembershipError(f"{host}: {error}; check the name") from error
    return [str(address[0]) for *_, address in found]


def _split(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65_535:  # noqa: PLR2004
        raise MembershipError(
            f"{name!r:.300} is not a name for DNS; write host:port or _service._tcp.domain"
        )
    return host, int(port)
