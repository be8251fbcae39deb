"""S3-FIFO, leaf-first: new blocks pass a small queue; those used there enter the large one.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), with the paper's loop:
the small queue is a tenth of the store and may exceed it until the main queue fills. What the paper
does not know is chains: a block whose turn comes while others here build upon it waits aside, and
goes as soon as the last of them has gone.

Use it where contexts that never return flood a store far smaller than what is used again: it lets
them pass. Do not use it where the store holds most of what is used again: two uses are then worth
less than one recent use, and it loses some points to leaf-first LRU (docs/reference/policies.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Hashable, Sequence

from holdfast.policy.queues import Queues

_SMALL, _MAIN, _ASIDE, _READY = range(4)
_SMALL_SHARE = 10
"""The small queue is the store divided by this."""

_USES_MAX = 3
_USES_TO_STAY = 2
"""Uses in the small queue, after the first, that lead into the main queue."""


class S3Fifo(Queues):
    """Two queues of rows and one of names that left the small one; 31 bytes a row beside names."""

    def __init__(self) -> None:
        self._uses = bytearray()
        super().__init__(4, self._uses)
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add rows: to the main queue those whose names left the small one lately, else to it."""
        uses, ghosts, append = self._uses, self._ghosts, self._lines.append
        for row, name, is_new in self._enter(rows, parents, names):
            if not is_new:
                self.touch([row], now_s)
                continue
            uses[row] = 0
            known = name in ghosts
            if known:
                del ghosts[name]
            append(_MAIN if known else _SMALL, row)

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Count one use of each row; one that had been judged already is in the main queue."""
        del now_s
        uses, where, known = self._uses, self._lines.where, len(self._lines.where)
        for row in rows:
            if row >= known or not where[row]:
                continue
            if uses[row] < _USES_MAX:
                uses[row] += 1
            if where[row] > _ASIDE:
                self._lines.append(_MAIN, row)

    def pass_by(self, row: int, now_s: float) -> None:
        """Count it as a use, as it is in use."""
        self.touch([row], now_s)

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves in the order that the queues give them up."""
        del now_s
        full = self._tree.rows

        def left(row: int, line: int, name: Hashable) -> None:
            del row
            if line == _SMALL:
                self._remember(name, full)

        return self._offer(lambda: self._next(full), left)

    def _next(self, full: int) -> int:
        """Return the row whose turn it is, having let pass those that were used; -1 for none."""
        lines, uses = self._lines, self._uses
        while True:
            row = lines.first(_READY)
            if row >= 0:
                return row
            small = lines.lengths[_SMALL]
            if small and (small >= full // _SMALL_SHARE or not lines.lengths[_MAIN]):
                row = lines.first(_SMALL)
                if uses[row] < _USES_TO_STAY:
                    return row
                uses[row] = 0
            else:
                row = lines.first(_MAIN)
                if row < 0 or not uses[row]:
                    return row
                uses[row] -= 1
            lines.append(_MAIN, row)

    def _remember(self, name: Hashable, full: int) -> None:
        """Keep a name for as many evictions as the main queue has room for."""
        self._ghosts[name] = None
        while len(self._ghosts) > full - full // _SMALL_SHARE:
            self._ghosts.popitem(last=False)
