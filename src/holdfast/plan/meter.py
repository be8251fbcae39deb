"""Measures a tier's read queue: bytes queued, bandwidth, and the tier's current estimate.

Pure: callers pass the time. A stalled queue lowers the estimate before any read has ended.
"""

from __future__ import annotations

from holdfast.plan.cost import LOWER_DEFAULT, TierEstimate, TierFit

WINDOW_S = 0.05
"""Length of one observation while the queue does not become empty."""


class QueueMeter:
    """Read queue of one tier. Not thread-safe. Times are in seconds, monotonic.

    `read_at`: time of the last arrival; None before the first.
    """

    def __init__(self, default: TierEstimate = LOWER_DEFAULT) -> None:
        self.fit = TierFit(default)
        self.queued_bytes = 0
        self.read_at: float | None = None
        self._since = 0.0
        self._starts = 1.0
        self._moved = 0
        self._complete = True

    def asked(self, nbytes: int, now: float) -> None:
        """Add `nbytes` to the queue."""
        if not self.queued_bytes:
            self._begin(now, starts=1.0)
        self.queued_bytes += nbytes

    def arrived(self, nbytes: int, asked: int, now: float) -> None:
        """Remove `asked` bytes from the queue, of which `nbytes` arrived and the rest failed.

        An observation with a failed read is discarded, because its time is not the tier's speed.
        """
        self.queued_bytes -= asked
        self._moved += nbytes
        self._complete = self._complete and nbytes == asked
        self.read_at = now
        if not self.queued_bytes or now - self._since >= WINDOW_S:
            self._observe(now)

    def dropped(self, nbytes: int, now: float) -> None:
        """Remove `nbytes` from the queue whose read has not begun."""
        self.queued_bytes -= nbytes
        if not self.queued_bytes:
            self._observe(now)

    def estimate(self, now: float) -> TierEstimate:
        """Return the current estimate: no faster than if the whole queue arrived now."""
        estimate = self.fit.estimate(self.queued_bytes)
        waited_s = now - self._since
        if self.queued_bytes and waited_s > estimate.latency_s:
            reading_s = waited_s - estimate.latency_s * self._starts
            most = (self._moved + self.queued_bytes) / reading_s
            estimate = estimate._replace(bytes_per_s=min(estimate.bytes_per_s, most))
        return estimate

    def _observe(self, now: float) -> None:
        """Add the arrivals since the last observation to the fit."""
        if self._complete:
            self.fit.observe(self._moved, now - self._since, starts=self._starts)
        self._begin(now, starts=0.0)

    def _begin(self, now: float, *, starts: float) -> None:
        self._since, self._starts = now, starts
        self._moved, self._complete = 0, True
