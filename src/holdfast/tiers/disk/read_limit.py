"""A read rate limit of a disk tier, to leave bandwidth of a shared medium to other users.

It also simulates a slow medium on a machine that has none.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class ReadLimit:
    """Limits reads to `bytes_per_s` over all threads; infinity is no limit. Thread-safe."""

    def __init__(
        self,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    @contextlib.contextmanager
    def paced(self, nbytes: int) -> Iterator[None]:
        """Count a read of `nbytes` in the `with` block; if it finishes early, wait at its end."""
        with self._lock:
            self._free_at = max(self._now(), self._free_at) + nbytes / self._bytes_per_s
            free_at = self._free_at
        yield
        early_s = free_at - self._now()
        if early_s > 0:
            self._sleep(early_s)
