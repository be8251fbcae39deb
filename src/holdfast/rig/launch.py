"""Run a program that ends with the one who started it: `python -m holdfast.rig.launch PID ARGV`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Ask the kernel for SIGTERM when process `argv[0]` ends, then become `argv[1:]`.

    The wish survives exec. Linux counts the *thread* that started us as the parent, so start
    programs from the main thread.
    """
    parent, *program = argv
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit(1)  # it ended before the kernel knew our wish
    os.execvp(program[0], program)  # noqa: S606  # the whole purpose


if __name__ == "__main__":
    main(sys.argv[1:])
