"""Checks that several kinds of tiers share: of option values, and of the servers they name.

A check of an option value raises ConfigError.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from holdfast.address import tcp_endpoint
from holdfast.byte_size import Size
from holdfast.errors import ConfigError
from holdfast.finding import Finding, problem

DEADLINE_S_MAX = 60.0
CONNECT_S = 1.0
"""Timeout of a connection to a server, when a tier is examined."""

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_at_least(size: Size, least: int, at: str) -> None:
    """Check that a size is not too small."""
    if size < least:
        raise ConfigError(f"{at}: {size} is less than {Size(least)}; raise it")


def check_above_zero(at: str, value: float, limit: float, unit: str = "s") -> None:
    """Check that a time is above 0 and at most `limit`, both in `unit`."""
    if not 0 < value <= limit:
        remedy = "lower it" if value > limit else "raise it"
        raise ConfigError(
            f"{at}: {value:,.10g} {unit} is not above 0 and at most {limit:,.0f} {unit}; {remedy}"
        )


def check_address(address: str, at: str) -> None:
    """Check that an address is tcp://HOST:PORT."""
    try:
        tcp_endpoint(address)
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error


def check_store_calls(deadline_s: float, ask_s: float, prefix: str, at: str) -> None:
    """Check the time limits and the key prefix of a tier on an external store."""
    check_above_zero(f"{at}.deadline_s", deadline_s, DEADLINE_S_MAX)
    check_above_zero(f"{at}.ask_s", ask_s, DEADLINE_S_MAX)
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"{at}.prefix: {prefix!r} is not a key prefix; use 1 to 64 of A-Z, a-z, 0-9, "
            "_, -, . and :"
        )


def examine_server(kind: str, addresses: Sequence[str], at: str) -> Finding:
    """Connect to the addresses in turn; `at` is the key path of the tier's section."""
    found, why = f"{kind} at {', '.join(addresses)}", ""
    for address in addresses:
        try:
            socket.create_connection(tcp_endpoint(address), timeout=CONNECT_S).close()
            return Finding(at, found, "can be reached", ok=True)
        except OSError as error:
            why = str(error)
    return problem(at, found, f"{why}; start it, or correct the address")
