"""Stop writes to a medium after many failed ones, then try again after pauses until one succeeds.

    writing --(FAILURES_MAX failed records within FAILURES_WITHIN_S)--> stopped for a pause
    stopped --(the pause is over)--> one batch is tried --(it fails)--> stopped for twice as long
                                                        --(it succeeds)--> writing

The batch that is tried consists of blocks that are to be written anyway. Two log lines tell of a
stop and its end, and none of the attempts between. Failures before a stop are logged at most once
in `WARN_S`.
"""

from __future__ import annotations

import logging
import math
from collections import deque

from holdfast.clock import Clock

FAILURES_MAX = 8
FAILURES_WITHIN_S = 600.0
"""`FAILURES_MAX` failed writes of records within `FAILURES_WITHIN_S` seconds stop writing."""

PAUSE_S = 1.0
PAUSE_MAX_S = 30.0
"""The first pause, and the longest. A stop within `FAILURES_WITHIN_S` of the last one continues
with its pause, so that a medium which fails in part does not stop and resume every second."""

WARN_S = 60.0
"""Shortest time between two log lines about failures."""

_logger = logging.getLogger("holdfast.tiers.disk.tier")


class WriteStop:
    """Whether one tier writes, and why not. Not thread-safe: the owner holds a lock."""

    def __init__(self, tier: str, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._failed_at: deque[float] = deque(maxlen=FAILURES_MAX)
        self._why = ""
        self._stopped_at = self._retry_at = self._warn_at = 0.0
        self._resumed_at = -math.inf
        self._pause_s = PAUSE_S
        self._since_warning = 0

    @property
    def is_stopped(self) -> bool:
        """Whether writes were stopped, and none has succeeded since."""
        return bool(self._why)

    def allows(self) -> bool:
        """Return whether to write now: writes were not stopped, or it is time to try again."""
        return not self._why or self._clock.now() >= self._retry_at

    def reason(self) -> str:
        """Return why and since when writes are stopped, and when one is tried; "" if they are not.

        It reads after "writes stopped".
        """
        if not self._why:
            return ""
        now_s = self._clock.now()
        left_s = self._retry_at - now_s
        next_try = f"in {math.ceil(left_s)} s" if left_s > 0 else "with the next block"
        return f"{now_s - self._stopped_at:.0f} s ago: {self._why}; tried again {next_try}"

    def succeeded(self) -> None:
        """Note that records were written: ends a stop."""
        if self._why:
            now_s = self._clock.now()
            self._why, self._resumed_at = "", now_s
            self._failed_at.clear()
            _logger.warning(
                "tier %s: writes resumed after %.0f s", self._tier, now_s - self._stopped_at
            )

    def failed(self, records: int, error: OSError) -> None:
        """Note that writes of this many records failed: may stop writes."""
        now_s = self._clock.now()
        if self._why:
            self._pause(now_s)
            return
        self._failed_at.extend([now_s] * records)
        full = len(self._failed_at) == FAILURES_MAX
        if not full or now_s - self._failed_at[0] > FAILURES_WITHIN_S:
            self.warn(records, error)
            return
        if now_s - self._resumed_at > FAILURES_WITHIN_S:
            self._pause_s = PAUSE_S
        self._why, self._stopped_at = str(error), now_s
        self._pause(now_s)
        _logger.error(
            "tier %s: writes stopped, because %d records could not be written within %.0f s: %s; "
            "reads go on, and a write is tried every %.0f to %.0f s until one succeeds",
            *(self._tier, FAILURES_MAX, FAILURES_WITHIN_S, error, PAUSE_S, PAUSE_MAX_S),
        )

    def warn(self, records: int, error: OSError) -> None:
        """Log records that could not be read or written, at most once in `WARN_S`."""
        self._since_warning += records
        now_s = self._clock.now()
        if now_s >= self._warn_at:
            count, self._since_warning = self._since_warning, 0
            self._warn_at = now_s + WARN_S
            _logger.warning("tier %s: %d records failed: %s", self._tier, count, error)

    def _pause(self, now_s: float) -> None:
        self._retry_at = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
