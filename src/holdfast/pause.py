"""Stops processes where they are, and lets them go on: what tests, campaigns and benches do.

SIGSTOP is a wish: on a busy machine the threads of a process go on, and answer, until one of them
has come to hear of it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from holdfast.errors import HoldfastError

STILL_S = 30.0

_STILL = frozenset("TtZX")
_POLL_S = 0.001


def pause(pid: int) -> None:
    """Stop a process, or the whole group that it leads; return when no thread of it runs.

    Raises ProcessLookupError if there is no such process, HoldfastError if one goes on.
    """
    _signal(pid, signal.SIGSTOP)
    end_s = time.monotonic() + STILL_S
    while not all(map(_stands_still, _led_by(pid))):
        if time.monotonic() > end_s:
            raise HoldfastError(
                f"process {pid} was stopped and still runs after {STILL_S:.0f} s; is it let go on "
                "by others?"
            )
        time.sleep(_POLL_S)


def resume(pid: int) -> None:
    """Let a process, or the group that it leads, go on."""
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    if os.getpgid(pid) == pid:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def _led_by(pid: int) -> list[int]:
    """Return the processes of the group that one leads; itself, if it leads none."""
    if os.getpgid(pid) != pid:
        return [pid]
    running = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [each for each in running if _group(each) == pid]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:  # it ended meanwhile
        return 0


def _stands_still(pid: int) -> bool:
    try:
        stats = [each.read_text() for each in Path("/proc", str(pid), "task").glob("*/stat")]
    except OSError:  # it, or one of its threads, ended meanwhile: look again
        return not Path("/proc", str(pid)).exists()
    # The state follows the name, which may hold anything, brackets as well.
    return all(stat.rpartition(")")[2].split()[0] in _STILL for stat in stats)
