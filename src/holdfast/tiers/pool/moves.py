"""What has to be written again: blocks read from where they no longer belong, and those lost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from holdfast.clock import Clock
from holdfast.limits import MIB
from holdfast.tiers.base import Place
from holdfast.tiers.pool.part import segment_of
from holdfast.tiers.pool.placement import Placement

MOVED_BYTES_PER_S = 64 * MIB
"""What one host writes anew of what it found elsewhere: half a 1 Gbit/s line, more or less."""

STRAYS_MAX = 65_536


class Strays:
    """Keys read from elsewhere than their owner, and how many may be written to it. Any thread."""

    def __init__(self, clock: Clock, bytes_per_s: float = MOVED_BYTES_PER_S) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._saved_bytes = bytes_per_s
        self._since_s = clock.now()
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self.moved = 0
        self.left = 0

    def found(self, keys: Sequence[bytes]) -> None:
        """Note keys that were read from elsewhere; the oldest are forgotten beyond a number."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            while len(self._keys) > STRAYS_MAX:
                self._keys.popitem(last=False)

    def take(self, keys: Sequence[bytes], record_bytes: int) -> set[bytes]:
        """Return which of these strayed, as far as the budget goes; none of them does any more."""
        with self._lock:
            strayed = [key for key in keys if key in self._keys]
            for key in strayed:
                del self._keys[key]
            now_s = self._clock.now()
            earned = self._bytes_per_s * (now_s - self._since_s)
            self._saved_bytes = min(self._bytes_per_s, self._saved_bytes + earned)
            self._since_s = now_s
            count = min(len(strayed), int(self._saved_bytes // max(record_bytes, 1)))
            self._saved_bytes -= count * record_bytes
            self.moved += count
            self.left += len(strayed) - count
            return set(strayed[:count])


class Losses:
    """Notices members that are gone, and says whose places were theirs. One thread."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._down: set[str] = set()

    def since(self, now: Placement, down: Collection[str]) -> Callable[[Place], bool] | None:
        """Return which places were those of members gone since last time; None if none is.

        `down` have not answered for so long that what they hold counts as lost; each counts once
        until it is up again.
        """
        before, self._placement = self._placement, now
        present = {member.id for member in now.members}
        gone = {member.id for member in before.members} - present
        gone |= (set(down) - self._down) & present
        self._down = set(down)
        if not gone:
            return None
        return lambda place: any(member.id in gone for member in before.rank(segment_of(place))[:1])
