"""What this machine gives a process: facts that are looked up, never guessed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


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
