"""Hedging: when to send a second request, and how many hedges the budget permits."""

from __future__ import annotations

import threading
from collections import deque

HEDGE_PERCENT = 5
HEDGES_SAVED_MAX = 10
"""Hedges that a quiet time saves up: enough for one stall of one target, no storm."""

SAMPLES_MAX = 128
SAMPLES_MIN = 20
_FRACTION = 0.95


class HedgeBudget:
    """At most `percent` hedges per 100 requests, at every moment. Thread-safe."""

    def __init__(self, percent: int = HEDGE_PERCENT) -> None:
        self._percent = percent
        self._saved_percent = 0
        self._lock = threading.Lock()
        self.requests = 0
        self.hedges = 0
        self.refused = 0

    def request(self) -> None:
        """Count a request that is sent in any case."""
        with self._lock:
            self.requests += 1
            most = 100 * HEDGES_SAVED_MAX
            self._saved_percent = min(most, self._saved_percent + self._percent)

    def take(self) -> bool:
        """Return whether one more hedge may be sent, and count it if so."""
        with self._lock:
            if self._saved_percent < 100:  # noqa: PLR2004  # per cent
                self.refused += 1
                return False
            self._saved_percent -= 100
            self.hedges += 1
            return True


class HedgeDelays:
    """Recent answer times of one target, and their 95th percentile.

    Record a cancelled request with the time it had taken so far. Without the slow requests the
    percentile would shrink until every request counted as late.
    """

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._stale = True
        self._late_s: float | None = None

    def record(self, seconds: float) -> None:
        """Record one request's time to its first byte."""
        self._last_s.append(seconds)
        self._stale = True

    def late_s(self) -> float | None:
        """Return the 95th percentile in seconds; None until there are enough samples."""
        if self._stale:
            ordered = sorted(self._last_s)
            enough = len(ordered) >= SAMPLES_MIN
            self._late_s = ordered[int(_FRACTION * len(ordered))] if enough else None
            self._stale = False
        return self._late_s
