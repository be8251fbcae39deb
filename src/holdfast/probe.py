"""Resources of this machine and of this process: kernel files, memory limits, free TCP ports."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PORTS = range(15_000, 32_000)
"""Below Linux's default range of ephemeral ports."""

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_drawn = itertools.count(random.SystemRandom().randrange(len(_PORTS)))


class MemoryInfo(NamedTuple):
    """Bytes of memory that this process may use, and the source of the limit."""

    nbytes: int
    source: str


def kernel_text(path: str, field: str = "") -> str:
    """Return the text of a kernel file, or of its line `field: value`; empty if it is missing."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    if not field:
        return text
    values = (line.partition(":")[2] for line in text.splitlines() if line.startswith(field))
    return next(values, "").strip()


class ProcessFigures(NamedTuple):
    """Processor time, memory, descriptors and start (Unix seconds) of this process."""

    cpu_s: float
    resident_bytes: int
    virtual_bytes: int
    open_fds: int
    max_fds: int
    started_s: float


def process_figures() -> ProcessFigures | None:
    """Return the figures of this process, as the kernel counts them; None without /proc."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        open_fds = (
            sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
        )  # without that of the listing
        boot = next(
            line for line in kernel_text("/proc/stat").splitlines() if line.startswith("btime ")
        )
    except (OSError, StopIteration):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may contain spaces
    user, system, start, virtual, pages = (int(fields[n]) for n in (11, 12, 19, 20, 21))
    tick_hz, soft = os.sysconf("SC_CLK_TCK"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ProcessFigures(
        cpu_s=(user + system) / tick_hz,
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        virtual_bytes=virtual,
        open_fds=open_fds,
        max_fds=sys.maxsize if soft == resource.RLIM_INFINITY else soft,
        started_s=int(boot.split()[1]) + start / tick_hz,
    )


def memory() -> MemoryInfo:
    """Return the smaller of the machine's memory and the smallest limit of its control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = MemoryInfo(machine, "the machine's memory")
    for file in _limit_files():
        try:
            limit = int(file.read_text())
        except (OSError, ValueError):  # missing, or "max"
            continue
        if limit < found.nbytes:
            found = MemoryInfo(limit, "the control group's limit")
    return found


def _limit_files() -> Iterator[Path]:
    """Yield the files with the memory limits of this process's control group and its ancestors.

    The root group of a container has a limit, that of a host has none. The last file is that of
    version 1 of control groups.
    """
    own = kernel_text(str(_OWN_GROUP), "0::").lstrip(":")  # "0::/system.slice/x.service"
    names = [name for name in own.split("/") if name]
    for depth in range(len(names) + 1):
        yield _CONTROL_GROUPS.joinpath(*names[:depth], "memory.max")
    yield _CONTROL_GROUPS / "memory" / "memory.limit_in_bytes"


def free_port() -> int:
    """Return a TCP port of the loopback interface on which no socket listens now.

    Each call returns another port, preferably one outside the kernel's ephemeral range. The kernel
    gives such a port to no outgoing connection: it stays free until a process binds its number, and
    a connection to it while it is free cannot connect to itself. Raises OSError if no port is free.
    """
    try:
        lowest = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _bound(0)
    for number in itertools.islice(_drawn, len(_PORTS)):  # after the ports of earlier calls
        if (port := _PORTS[number % len(_PORTS)]) < lowest:
            with contextlib.suppress(OSError):
                return _bound(port)
    return _bound(0)


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        number: int = probe.getsockname()[1]
        return number
