"""Calls of a drive that have not returned, and the age of the oldest: a drive that hangs is away.

A blocked system call cannot be ended, and it owns its buffers until it returns. So its thread waits
on, and everything else goes on without the drive.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.clock import Clock

HANG_S = 15.0
"""Age of a call from which its drive counts as hanging, in seconds. A drive that is busy, or that
resets itself, answers within this time in most cases."""

PROBE_WAIT_S = 1.0
"""Longest time that a look at a drive waits for its probe; the next look goes on with it."""


class CallsInProgress:
    """The calls of one medium. Thread-safe without a lock: each call has an entry of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._begun_s: dict[int, float] = {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call from now on, until the `with` block ends."""
        number = next(self._numbers)
        self._begun_s[number] = self._clock.now()
        try:
            yield
        finally:
            del self._begun_s[number]

    def why_hanging(self) -> str:
        """Return since when a call has not returned, if it counts as hanging; else empty."""
        age_s = self._clock.now() - min(list(self._begun_s.values()), default=self._clock.now())
        return f"a call has not returned for {age_s:.0f} s" if age_s >= HANG_S else ""


class DriveProbe:
    """A check of a medium, on a thread of its own because the drive may hang."""

    def __init__(self, check: Callable[[], str], calls: CallsInProgress, name: str) -> None:
        self._check = check
        self._calls = calls
        self._why = ""
        self._thread = threading.Thread(
            target=self._run, name=f"holdfast-{name}-probe", daemon=True
        )
        self._thread.start()

    def result(self) -> str | None:
        """Return why the medium cannot be used, empty if it can; None while the check runs."""
        self._thread.join(PROBE_WAIT_S)
        return None if self._thread.is_alive() else self._why

    def _run(self) -> None:
        with self._calls.one():
            self._why = self._check()
