"""Check whether a process is ready to run: its main thread computes, or waits for a processor.

A node whose answer is late because other programs keep every processor busy is healthy. The kernel
accounts a thread's wait for a processor only when the wait ends, so a client reads the state of
the node's main thread, which answers every request that needs no I/O.
"""

from __future__ import annotations

import os
from pathlib import Path


def is_runnable(pid: int) -> bool:
    """Return whether another process is ready to run; False for this process and unknown ids."""
    if pid <= 0 or pid == os.getpid():
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b") ")[2][:1] == b"R"
