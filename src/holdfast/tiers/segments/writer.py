"""The identity of one writer of a medium: a random name, its clocks, and names for its objects."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from holdfast.clock import Clock, SystemClock
from holdfast.tiers.segments.format import AGE_CLASSES, SegmentName, next_number


class SegmentWriter:
    """One per open tier, so that two processes are never the same writer. Thread-safe.

    `age_class`: the prefix of its segments. `wall_s` returns seconds since 1970; numbers of objects
    contain it. `clock` measures waits.
    """

    def __init__(
        self,
        age_class: str,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.clock = clock or SystemClock()
        self.wall_s = wall_s
        self._age_class = age_class
        self._lock = threading.Lock()
        self._last = ""

    def outlasts(self, name: SegmentName, by: float = 0.0) -> bool:
        """Return whether a segment that is made now is kept longer than another one.

        `by`: longer than this fraction of its age class.
        """
        return self.wall_s() + (1 - by) * AGE_CLASSES[self._age_class] > name.expires_s()

    def new_segment(self) -> SegmentName:
        """Return a name that no object has had."""
        with self._lock:
            self._last = next_number(self._last, self.wall_s())
            return SegmentName(self._age_class, self.id, self._last)
