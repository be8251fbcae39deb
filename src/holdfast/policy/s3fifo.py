"""S3-FIFO eviction, leaf-first: new blocks enter a small queue; those reused move to the main one.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), with the paper's loop:
the small queue is a tenth of the store and may exceed it until the main queue fills. The paper has
no chains: a victim that still has children on this tier is deferred, and evicted as soon as the
last of them is evicted.

Use it if contexts that never return flood a store far smaller than the reused blocks: they pass
through. Do not use it if the store holds most of the reused blocks: two old uses then predict less
than a recent one, and leaf-first LRU hits some points more (docs/reference/policies.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from holdfast.policy.queues import DEFERRED, READY, QueuePolicy

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 10
"""The store's rows divided by this are the small queue."""

_USES_MAX = 3
_USES_TO_STAY = 2
"""Uses in the small queue, after the first, that move a row into the main queue."""


class S3Fifo(QueuePolicy):
    """Two queues of rows, and the names evicted from the small one; 145 bytes a row and names."""

    def __init__(self) -> None:
        self._uses = bytearray()
        super().__init__(self._uses)
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Count one use of each row; a deferred or ready row returns to the main queue."""
        del now_s
        uses, where, known = self._uses, self._where, len(self._where)
        for row in rows:
            if row >= known or not where[row]:
                continue
            if uses[row] < _USES_MAX:
                uses[row] += 1
            if where[row] > DEFERRED:  # `where` counts from 1
                self._append(_MAIN, row)

    def _queue_for(self, row: int, name: Hashable) -> int:
        """Return the small queue, or the main one if the name left the small one lately."""
        self._uses[row] = 0
        known = name in self._ghosts
        self._ghosts.pop(name, None)
        return _MAIN if known else _SMALL

    def _remember(self, row: int, queue: int, name: Hashable, full: int) -> None:
        """Remember the name if the row was in the small queue."""
        del row
        if queue != _SMALL:
            return
        self._ghosts[name] = None
        while len(self._ghosts) > full - full // _SMALL_SHARE:
            self._ghosts.popitem(last=False)

    def _next(self, full: int) -> int:
        """Return the next victim, after moving used rows to the main queue; -1 if there is none."""
        queues, uses = self._queues, self._uses
        while True:
            row = self._first(READY)
            if row >= 0:
                return row
            small = len(queues[_SMALL])
            if small and (small >= full // _SMALL_SHARE or not queues[_MAIN]):
                row = self._first(_SMALL)
                if uses[row] < _USES_TO_STAY:
                    return row
                uses[row] = 0
            else:
                row = self._first(_MAIN)
                if row < 0 or not uses[row]:
                    return row
                uses[row] -= 1
            self._append(_MAIN, row)
