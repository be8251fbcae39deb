"""DNS lookup of SRV records (RFC 2782) with dnspython, which the extra `dns` installs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import MembershipError

if TYPE_CHECKING:
    from dns.resolver import Resolver


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
    except ImportError as error:
        raise MembershipError(
            f"SRV records of {name}: dnspython is not installed; pip install 'holdfast-kv[dns]'"
        ) from error
    try:
        found = _resolver(servers).resolve(name, "SRV", lifetime=timeout_s, search=False)
    except (exception.DNSException, OSError, UnicodeError) as error:
        raise MembershipError(
            f"SRV records of {name!r:.300}: {error}; check the name and the name server"
        ) from error
    return [
        SrvRecord(each.priority, each.weight, each.port, each.target.to_text(omit_final_dot=True))
        for each in found
    ]


def _resolver(servers: Sequence[tuple[str, int]]) -> Resolver:
    from dns.resolver import Resolver

    resolver = Resolver(configure=not servers)
    if servers:
        resolver.nameservers = [address for address, _ in servers]
        resolver.nameserver_ports = dict(servers)
    return resolver
