"""Monotonic clocks: the machine's, and a manual one for tests and the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Return monotonic seconds; only differences have a meaning."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that advances only by its methods; for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the seconds that the clock was set and advanced to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
