"""A read rate limit for a tier, to leave bandwidth of a shared medium to other users.

It also simulates a slow medium on a machine that has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from holdfast.errors import Outcome
from holdfast.tiers.base import (
    LocalTier,
    Lockable,
    Place,
    ReservedPlaces,
    SurvivingRecord,
    TierGet,
    TierPut,
    TierUsage,
)


class ThrottledTier:
    """Limits reads of `inner` to `bytes_per_s` over all threads; writes pass unchanged.

    A read that finishes early waits before it returns. Owns and closes `inner`.
    """

    def __init__(
        self,
        inner: LocalTier,
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

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        return self._inner.reserve(sizes)

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        return self._inner.write(batch)

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
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

    def survivors(self) -> Iterator[SurvivingRecord]:
        return self._inner.survivors()

    def usage(self) -> TierUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def give_up_copy(self) -> None:
        if isinstance(self._inner, Lockable):
            self._inner.give_up_copy()
