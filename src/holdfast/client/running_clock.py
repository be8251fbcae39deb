"""A clock that excludes the time a thread waits in a run queue for a processor.

The timeout of a node's answer is a share of the time to compute the prompt. If other programs keep
every processor busy, the computation, the node and this thread all take several times as long; with
a timeout in wall-clock time, healthy nodes would count as late.
"""

from __future__ import annotations

import os
import time

_SCHEDSTAT = "/proc/thread-self/schedstat"
_READ_BYTES = 128


class RunningClock:
    """Seconds of wall-clock time, less those that the calling thread waited in a run queue.

    Use it from one thread. If the kernel has no `schedstat`, it is wall-clock time. A call takes
    about a microsecond.
    """

    def __init__(self) -> None:
        self._file = -1

    def __call__(self) -> float:
        """Return the time; only differences have a meaning."""
        if self._file < 0:
            try:
                self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return time.monotonic()
        now = time.monotonic()
        # Fields: nanoseconds on a processor, nanoseconds in a run queue, time slices.
        return now - int(os.pread(self._file, _READ_BYTES, 0).split()[1]) / 1e9

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
