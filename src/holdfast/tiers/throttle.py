"""A tier that is read no faster than it may be: leaves the rest of a medium to others.

Also the way to see what the planner makes of a slow medium, on a machine that has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from holdfast.errors import Outcome
from holdfast.tiers.base import Get, Place, Put, Reserved, Survivor, Tier, Usage


class Throttled:
    """`inner`, read at `bytes_per_s` at most, however many threads read it; writes pass.

    A read that comes early waits at its end. Owns and closes `inner`.
    """

    def __init__(
        self,
        inner: Tier,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        return self._inner.reserve(sizes)

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        return self._inner.write(batch)

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        nbytes = sum(len(get.into) for get in batch)
        with self._lock:
            self._free_at = max(self._now(), self._free_at) + nbytes / self._bytes_per_s
            free_at = self._free_at
        outcomes = self._inner.read(batch)
        early_s = free_at - self._now()
        if early_s > 0:
            self._sleep(early_s)
        return outcomes

    def free(self, places: Sequence[Place]) -> None:
        self._inner.free(places)

    def survivors(self) -> Iterator[Survivor]:
        return self._inner.survivors()

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()
