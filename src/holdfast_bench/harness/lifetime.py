"""Ties a process to its owner: when the owner ends, the kernel or a guardian kills the process.

This file, executed with `OWNER ARGV`, runs a program in this way. It uses two mechanisms, because
neither covers every case. `PR_SET_PDEATHSIG` kills the program at once, and works without a
guardian; it does not reach the program's own children, and Linux counts the *thread* that started
the program as its parent. The guardian, a small process in its own session, waits until the owner
ends and kills the program's whole process group with SIGKILL, which also ends stopped processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_GUARD = "guard"
_STANDARD_STREAMS = 3


def owned(argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` for as long as this process lives.

    The program leads a process group of its own. Start it from a thread that lives at least as
    long as the program does.
    """
    return [*_command(), str(os.getpid()), *argv]


def die_with(owner: int) -> None:
    """Ask the kernel for SIGKILL when the parent of this process ends; exit if it has ended.

    The request survives exec, and no fork.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != owner:
        os._exit(1)  # the owner ended before the kernel knew of the request


def main(argv: Sequence[str]) -> None:
    """Tie this process to the process `argv[0]`, its parent, then become `argv[1:]`."""
    owner, *program = argv
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    die_with(int(owner))
    watched = os.pidfd_open(int(owner)), os.pidfd_open(os.getpid())
    if os.getppid() != int(owner):
        os._exit(1)  # the owner ended, and its process id may belong to another process
    started = os.fork()
    if started == 0:
        try:
            _start_guardian(os.getppid(), watched)
        finally:
            os._exit(1)
    os.waitpid(started, 0)
    os.execvp(program[0], program)  # noqa: S606  # the whole purpose


def _start_guardian(group: int, watched: Sequence[int]) -> None:
    """Become the guardian, which is not a child of the program and shares no open file with it.

    The guardian runs in a new interpreter, so that process lists do not show it under the program's
    command. Until then this process stays in the program's group, and is killed with it.
    """
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(_STANDARD_STREAMS):
        os.dup2(nothing, stream)
    last = max(watched)
    for descriptor in watched:
        os.set_inheritable(descriptor, True)
    for descriptor in set(range(_STANDARD_STREAMS, last)).difference(watched):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    numbers = map(str, (group, *watched))
    os.execv(sys.executable, [*_command(), _GUARD, *numbers])  # noqa: S606  # see above


def _guard(group: int, owner_end: int, program_end: int) -> None:
    """Kill the group when the owner has ended; return when no process of the group is left."""
    os.setsid()
    watched = select.poll()
    watched.register(owner_end, select.POLLIN)
    watched.register(program_end, select.POLLIN)
    ended = {descriptor for descriptor, _ in watched.poll()}
    while owner_end not in ended and _is_left(group):
        # The program has ended, and children of it go on.
        ended = set(select.select([owner_end], [], [], _POLL_S)[0])
    if owner_end in ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _is_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _command() -> list[str]:
    """Return the command that runs this file; without `site` and the package it starts in 10 ms."""
    return [sys.executable, "-I", "-S", __file__]


if __name__ == "__main__":
    if sys.argv[1] == _GUARD:
        _guard(*map(int, sys.argv[2:]))
    else:
        main(sys.argv[1:])
