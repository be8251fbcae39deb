"""Pause and resume processes with SIGSTOP and SIGCONT, for tests, campaigns and benches.

SIGSTOP takes effect with a delay: on a busy machine the threads of a process continue, and answer
requests, until one of them handles the signal. `pause` waits for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from holdfast.errors import HoldfastError

STOP_TIMEOUT_S = 30.0

_STOPPED_STATES = frozenset("TtZX")
_POLL_S = 0.001


def pause(pid: int) -> None:
    """Stop a process, or the whole group that it leads; return when none of its threads runs.

    Raises ProcessLookupError if there is no such process, HoldfastError if it still runs after
    `STOP_TIMEOUT_S`.
    """
    _signal(pid, signal.SIGSTOP)
    end_s = time.monotonic() + STOP_TIMEOUT_S
    while not all(map(_is_stopped, _group_of(pid))):
        if time.monotonic() > end_s:
            raise HoldfastError(
                f"process {pid} still runs {STOP_TIMEOUT_S:.0f} s after SIGSTOP; "
                "does another process resume it?"
            )
        time.sleep(_POLL_S)


def resume(pid: int) -> None:
    """Resume a process, or the whole group that it leads."""
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    if os.getpgid(pid) == pid:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def _group_of(pid: int) -> list[int]:
    """Return the processes of the group that a process leads; only itself if it leads none."""
    if os.getpgid(pid) != pid:
        return [pid]
    members = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a process may end during the loop
            if entry.name.isdecimal() and os.getpgid(int(entry.name)) == pid:
                members.append(int(entry.name))
    return members


def _is_stopped(pid: int) -> bool:
    try:
        stats = [each.read_text() for each in Path("/proc", str(pid), "task").glob("*/stat")]
    except OSError:  # the process has ended, or one of its threads: the caller retries
        return not Path("/proc", str(pid)).exists()
    # The state follows the name in brackets, and the name may contain brackets.
    return all(stat.rpartition(")")[2].split()[0] in _STOPPED_STATES for stat in stats)
