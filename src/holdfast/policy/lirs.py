"""LIRS eviction, leaf-first: keep blocks with a short reuse interval; others get 1 % of the store.

Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve
buffer cache performance" (SIGMETRICS 2002). The paper's stack is represented by stamps: a block is
in the stack if it was used since the least recently used block of the low set. The paper has no
chains: a victim that still has children on this tier is deferred, and evicted as soon as the last
of them is evicted.

Use it if the store is far smaller than the reused blocks. Do not use it if sessions end: it keeps
blocks that were reused often, also those of finished sessions; with space for most of the reused
blocks, leaf-first LRU is better (docs/reference/policies.md). Every use costs time for every block
of a chain.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Generator, Hashable, Sequence

from holdfast.policy.queues import READY, QueuePolicy

_LOW, _HIGH = 0, 1
_HIGH_SHARE = 100
"""The store's rows divided by this are for blocks outside the low set."""


class Lirs(QueuePolicy):
    """A low set in order of use, a queue of the others, and evicted names; 150 bytes a row."""

    def __init__(self) -> None:
        self._used = array("q")
        super().__init__(self._used)
        self._tick = 0
        self._ghosts: OrderedDict[Hashable, int] = OrderedDict()
        self._was_full = False

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Record a use of each row; a row that is used again soon enters the low set."""
        del now_s
        used, where, known = self._used, self._where, len(self._where)
        append, tick = self._append, self._tick
        for row in reversed(rows):
            if row >= known or not where[row]:
                continue
            tick += 1
            soon = where[row] == _LOW + 1 or used[row] > self._oldest()
            append(_LOW if soon else _HIGH, row)
            used[row] = tick
        self._tick = tick

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves outside the low set, which shrinks if there are none."""
        full = self._tree.rows
        self._was_full = True
        while len(self._queues[_LOW]) > full - full // _HIGH_SHARE:
            self._append(_HIGH, self._first(_LOW))
        return super().victims(now_s)

    def _queue_for(self, row: int, name: Hashable) -> int:
        """Return the low set if the name returned soon, or if the store was never full."""
        soon = self._ghosts.pop(name, -1) > self._oldest()
        self._tick += 1
        self._used[row] = self._tick
        return _LOW if soon or not self._was_full else _HIGH

    def _remember(self, row: int, queue: int, name: Hashable, full: int) -> None:
        """Remember the name if the row was used since the least recently used low one."""
        del queue
        if self._used[row] > self._oldest():
            self._ghosts[name] = self._used[row]
        while len(self._ghosts) > full:
            self._ghosts.popitem(last=False)

    def _next(self, full: int) -> int:
        """Return the next victim, out of the low set if no other is left; -1 if there is none."""
        del full
        for queue in (READY, _HIGH, _LOW):
            row = self._first(queue)
            if row >= 0:
                return row
        return -1

    def _oldest(self) -> int:
        """Return the stamp of the least recently used row of the low set: the stack's bottom."""
        row = self._first(_LOW)
        return self._used[row] if row >= 0 else 0
