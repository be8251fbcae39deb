"""Ports of a SeaweedFS server, which takes each port a second time, with 10,000 added."""

from __future__ import annotations

import contextlib
import random
import socket

from holdfast.errors import HoldfastError

SECOND = 10_000
_PORTS = range(2_100, 4_900)
"""Neither these nor the second ones are drawn by `holdfast.probe.free_port` or the kernel."""


def free_seaweed_port() -> int:
    """Return a port of the loopback interface on which, as on its second one, nothing listens.

    Raises HoldfastError if there is none.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + SECOND))
            return port
    raise HoldfastError(
        f"no port from {_PORTS[0]} to {_PORTS[-1]} is free together with the one {SECOND:,} higher"
    )
