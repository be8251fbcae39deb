"""What is in line before a tier, and how fast the line moves: the tier's estimate as of now.

Pure: whoever moves the bytes says when. A line that stands still makes the estimate worse by
itself, before a single read has ended.
"""

from __future__ import annotations

from holdfast.plan.cost import LOWER_DEFAULT, TierEstimate, TierFit

WINDOW_S = 0.05
"""A line that never ends is looked at this often."""


class Meter:
    """One tier: bytes asked for and bytes arrived. Not thread-safe. Times in monotonic seconds.

    `read_at`: when bytes arrived last; None while none did.
    """

    def __init__(self, default: TierEstimate = LOWER_DEFAULT) -> None:
        self.fit = TierFit(default)
        self.queued_bytes = 0
        self.read_at: float | None = None
        self._since = 0.0
        self._starts = 1.0
        self._moved = 0
        self._sound = True

    def asked(self, nbytes: int, now: float) -> None:
        """Note that `nbytes` are in line from now on."""
        if not self.queued_bytes:
            self._begin(now, starts=1.0)
        self.queued_bytes += nbytes

    def arrived(self, nbytes: int, asked: int, now: float) -> None:
        """Note that of `asked` bytes in line `nbytes` are there, and the others will not come.

        How long it took to hear that says nothing about the tier's speed.
        """
        self.queued_bytes -= asked
        self._moved += nbytes
        self._sound = self._sound and nbytes == asked
        self.read_at = now
        if not self.queued_bytes or now - self._since >= WINDOW_S:
            self._look(now)

    def dropped(self, nbytes: int, now: float) -> None:
        """Note that this much was taken out of the line before anybody touched it."""
        self.queued_bytes -= nbytes
        if not self.queued_bytes:
            self._look(now)

    def estimate(self, now: float) -> TierEstimate:
        """Return the tier as it is: no faster than if all of the line arrived this moment."""
        estimate = self.fit.estimate(self.queued_bytes)
        waited_s = now - self._since
        if self.queued_bytes and waited_s > estimate.latency_s:
            most = (self._moved + self.queued_bytes) / (
                waited_s - estimate.latency_s * self._starts
            )
            estimate = estimate._replace(bytes_per_s=min(estimate.bytes_per_s, most))
        return estimate

    def _look(self, now: float) -> None:
        """Learn from the line since the last look."""
        if self._sound:
            self.fit.observe(self._moved, now - self._since, starts=self._starts)
        self._begin(now, starts=0.0)

    def _begin(self, now: float, *, starts: float) -> None:
        self._since, self._starts = now, starts
        self._moved, self._sound = 0, True
