"""A report that many peers may ask for at once and without end, made once for all who wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PacedReport(Generic[T]):
    """Makes a report for every caller that waits. Thread-safe.

    One caller makes it, for all that asked before it began, so an answer is never older than its
    question. The next report begins `rest` times as long after the last one as that one took, so
    callers without a pause take at most `1 / (1 + rest)` of a processor.
    """

    def __init__(self, make: Callable[[], T], rest: float) -> None:
        self._make = make
        self._rest = rest
        self._changed = threading.Condition()
        self._begun = 0
        """Number of reports that have begun; the last one has this number."""
        self._last: tuple[int, T] | None = None
        """The last report that was made, and its number."""
        self._is_making = False
        self._waiting = 0
        self._rests_until_s = 0.0

    @property
    def waiting(self) -> int:
        """The number of callers that wait for a report, without the one that makes it."""
        return self._waiting

    def read(self) -> T:
        """Return a report that began after this call; raise what making it raises."""
        with self._changed:
            own = self._begun + 1
            self._waiting += 1
            try:
                while self._last is None or self._last[0] < own:
                    rest_s = self._rests_until_s - time.monotonic()
                    if not self._is_making and rest_s <= 0:
                        self._begun += 1
                        self._is_making = True
                        break
                    self._changed.wait(None if self._is_making else rest_s)
                else:
                    return self._last[1]
            finally:
                self._waiting -= 1
        return self._make_and_tell(self._begun)

    def _make_and_tell(self, number: int) -> T:
        began_s = time.monotonic()
        try:
            made = self._make()
            with self._changed:
                self._last = number, made
            return made
        finally:
            with self._changed:
                self._is_making = False
                now_s = time.monotonic()
                self._rests_until_s = now_s + self._rest * (now_s - began_s)
                self._changed.notify_all()
