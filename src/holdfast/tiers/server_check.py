"""Check whether a server that another project provides accepts connections."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from holdfast.finding import Finding, problem
from holdfast.wire.address import tcp_endpoint

CONNECT_S = 1.0
"""Timeout of one connection."""


def examine_server(kind: str, addresses: Sequence[str], at: str) -> Finding:
    """Try the addresses in turn; `at` is the key path of the tier's section."""
    found, why = f"{kind} at {', '.join(addresses)}", ""
    for address in addresses:
        try:
            socket.create_connection(tcp_endpoint(address), timeout=CONNECT_S).close()
            return Finding(at, found, "can be reached", ok=True)
        except OSError as error:
            why = str(error)
    return problem(at, found, f"{why}; start it, or correct the address")
