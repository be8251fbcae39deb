"""What this machine gives a process: facts that are looked up, never guessed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PORTS = range(15_000, 32_000)
"""Below those that Linux lends to whoever names none, unless it was told otherwise."""

_LENT = Path("/proc/sys/net/ipv4/ip_local_port_range")
_drawn = itertools.count(random.SystemRandom().randrange(len(_PORTS)))


class Memory(NamedTuple):
    """Bytes of memory this process may use, and who says so."""

    nbytes: int
    source: str


def memory() -> Memory:
    """Return the smaller of the machine's memory and the control group's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = Memory(machine, "the machine's memory")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int(Path("/sys/fs/cgroup", name).read_text())
        except (OSError, ValueError):
            continue
        if limit < found.nbytes:
            found = Memory(limit, "the control group's limit")
    return found


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on right now.

    Another one at each call, and where there are such, one that the kernel lends to nobody: it is
    free until somebody asks for it by its number, however many connect meanwhile, and no connection
    to it while it is free can come out at itself. Raises OSError where no port is free.
    """
    for port in _unlent():
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        number: int = probe.getsockname()[1]
        return number


def _unlent() -> Iterator[int]:
    """Yield ports that the kernel lends to nobody, none of them twice in a while."""
    try:
        lowest = int(_LENT.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return
    for number in itertools.islice(_drawn, len(_PORTS)):
        if (port := _PORTS[number % len(_PORTS)]) < lowest:
            yield port
