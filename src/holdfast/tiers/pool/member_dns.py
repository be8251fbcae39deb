"""Members from DNS: the addresses behind a name, or the SRV records of a service.

    pool.example.org:7070        every A and AAAA record is a member, named by its address
    _holdfast._tcp.example.org   every SRV record is a member, named by its host and port, and
                                 weighted; only the records of the lowest priority count

SRV keeps a member's name, and so its segments, when its address changes. A name that does not
resolve, or to nothing, is trouble: the last view stays. Servers that return a few records of many
at a time work too, as long as every member turns up once in `dead_after_s`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from holdfast.errors import MembershipError
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.roster import MEMBERS_MAX, TCP, read_member, tcp_address
from holdfast.tiers.pool.rounds import Rounds
from holdfast.tiers.pool.srv import SrvRecord, lookup_srv

LOOK_S = 5.0


class MemberDns:
    """Asks again every `look_s`. A `MembershipSource`.

    `name` is `host:port`, or a name that starts with `_` for SRV records. The resolvers are the
    system's unless a test brings its own.
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
        self._told: Callable[[Sequence[Member]], None] | None = None
        self._rounds = Rounds(f"members in DNS {name}", self._look, look_s, look_s)

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        self._told = told
        self._rounds.start()

    def trouble(self) -> str:
        return self._rounds.trouble

    def close(self) -> None:
        self._rounds.close()

    def _look(self) -> None:
        members = self._from_addresses() if self._port else self._from_services()
        if not 0 < len(members) <= MEMBERS_MAX:
            raise MembershipError(
                f"{self._name}: {len(members)} members, not 1 to {MEMBERS_MAX}; check the records"
            )
        if self._told is not None:
            self._told(members)

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
            f"{name!r:.300} is no name to ask DNS for; write host:port or _service._tcp.domain"
        )
    return host, int(port)
