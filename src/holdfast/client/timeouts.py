"""Timeouts of a node's answers: a backoff, and a clock that excludes waits for a processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

MIN_SHARE = 1 / 64
"""Smallest share of the limit that a timeout shrinks to."""

_SCHEDSTAT = "/proc/thread-self/schedstat"
_READ_BYTES = 128


class Backoff:
    """A timeout that shrinks while a node does not answer, which bounds the total wait for it.

    The first wait has the full timeout; each late answer halves the next one, down to `MIN_SHARE`.
    """

    def __init__(self) -> None:
        self._share = 1.0

    def timeout_s(self, limit_s: float) -> float:
        """Return how long to wait for the next answer, at most `limit_s`."""
        return limit_s * self._share

    def late(self) -> None:
        """Note that an answer did not arrive in time."""
        self._share = max(self._share / 2, MIN_SHARE)

    def answered(self) -> None:
        """Note that an answer arrived."""
        self._share = 1.0


class RunningClock:
    """Seconds of wall-clock time, less those that the calling thread waited in a run queue.

    If other programs keep every processor busy, the computation of a prompt, the node and this
    thread all take several times as long; by wall-clock time, healthy nodes would count as late.
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


class EngineClocks(NamedTuple):
    """The clocks of an engine's scheduler side, in seconds.

    `now`: wall-clock time, for durations of steps. `running`: for timeouts of a node's answers.
    """

    now: Callable[[], float] = time.monotonic
    running: Callable[[], float] = time.monotonic
