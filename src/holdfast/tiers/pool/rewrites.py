"""Blocks of a pool to write again: those found at a wrong member, and those of lost members."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.limits import MIB
from holdfast.membership.placement import Placement
from holdfast.tiers.base import Place
from holdfast.tiers.pool.segment_batch import segment_of

MOVED_BYTES_PER_S = 64 * MIB
"""Rate at which one host rewrites misplaced blocks: about half of a line of 1 Gbit/s."""

MISPLACED_MAX = 65_536


class MisplacedBlocks:
    """Keys read from another member than their owner, with a budget for rewriting. Thread-safe."""

    def __init__(self, clock: Clock, bytes_per_s: float = MOVED_BYTES_PER_S) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._saved_bytes = bytes_per_s
        self._since_s = clock.now()
        self._keys: OrderedDict[tuple[Namespace, bytes], None] = OrderedDict()
        self._lock = threading.Lock()
        self.moved = 0

    def found(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Record keys read from another member; beyond a limit the oldest are forgotten."""
        with self._lock:
            self._keys.update(dict.fromkeys((namespace, key) for key in keys))
            while len(self._keys) > MISPLACED_MAX:
                self._keys.popitem(last=False)

    def take(self, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
        """Remove and return which of these keys are misplaced, within the budget."""
        with self._lock:
            if not self._keys:
                return set()
            misplaced = [key for key in keys if (namespace, key) in self._keys]
            for key in misplaced:
                del self._keys[namespace, key]
            now_s = self._clock.now()
            earned = self._bytes_per_s * (now_s - self._since_s)
            self._saved_bytes = min(self._bytes_per_s, self._saved_bytes + earned)
            self._since_s = now_s
            count = min(len(misplaced), int(self._saved_bytes // namespace.slot_bytes))
            self._saved_bytes -= count * namespace.slot_bytes
            self.moved += count
            return set(misplaced[:count])


class LostBlocks:
    """Detects members that are gone, and tells which places were theirs. Use from one thread."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._down: set[str] = set()

    def since(self, now: Placement, down: Collection[str]) -> Callable[[Place], bool] | None:
        """Return which places belonged to members that left since the last call; None if none did.

        `down`: members that have not answered for so long that their blocks count as lost. Each
        counts once until it is up again.
        """
        before, self._placement = self._placement, now
        present = {member.id for member in now.members}
        gone = {member.id for member in before.members} - present
        gone |= (set(down) - self._down) & present
        self._down = set(down)
        if not gone:
            return None
        return lambda place: any(member.id in gone for member in before.owners(segment_of(place)))
