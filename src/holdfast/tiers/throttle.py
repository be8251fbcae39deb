"""A read rate limit for a tier, to leave bandwidth of a shared medium to other users.

It also simulates a slow medium on a machine that has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from holdfast.errors import Outcome
from holdfast.tiers.base import Erasable, LocalTier, Lockable, TierGet


class ThrottledTier:
    """Limits reads of `inner` to `bytes_per_s` over all threads; writes pass unchanged.

    A read that finishes early waits before it returns. Owns and closes `inner`. Erasable
    and Lockable if `inner` is.
    """

    def __init__(
        self,
        inner: LocalTier,
        bytes_per_s: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = inner.name
        self.reserve, self.write, self.free = inner.reserve, inner.write, inner.free
        self.survivors, self.usage, self.close = inner.survivors, inner.usage, inner.close
        if isinstance(inner, Erasable):
            self.wipe = inner.wipe
        if isinstance(inner, Lockable):
            self.give_up_copy = inner.give_up_copy
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

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
