"""LIRS, leaf-first: what came back soon last time stays; the rest pass through one per cent.

Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy to improve
buffer cache performance" (SIGMETRICS 2002). The paper's stack is kept as stamps: a block is in the
stack if it was used since the least recently used block of the low set. What the paper does not
know is chains: a block whose turn comes while others here build upon it waits aside, and goes as
soon as the last of them has gone.

Use it where the store is far smaller than what is used again. Do not use it where sessions end: it
keeps blocks that came back often, and those of finished sessions did; with space for most of what
is used again it loses to leaf-first LRU (docs/reference/policies.md). Every use costs time for
every block of a chain.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Generator, Hashable, Sequence

from holdfast.policy.queues import Queues

_LOW, _HIGH, _ASIDE, _READY = range(4)
_HIGH_SHARE = 100
"""Rows for blocks outside the low set: the store divided by this."""


class Lirs(Queues):
    """A low set in order of use, a queue of the others, and names that left it; 38 bytes a row."""

    def __init__(self) -> None:
        self._used = array("q")
        super().__init__(4, self._used)
        self._tick = 0
        self._ghosts: OrderedDict[Hashable, int] = OrderedDict()
        self._was_full = False

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add rows: to the low set if the name came back soon, or if the store never was full."""
        used, ghosts, append = self._used, self._ghosts, self._lines.append
        for row, name, is_new in self._enter(rows, parents, names):
            if not is_new:
                self.touch([row], now_s)
                continue
            self._tick += 1
            soon = ghosts.pop(name, -1) > self._oldest()
            append(_LOW if soon or not self._was_full else _HIGH, row)
            used[row] = self._tick

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Note a use of each row; one that came back soon enters the low set."""
        del now_s
        used, where, known = self._used, self._lines.where, len(self._lines.where)
        append, tick = self._lines.append, self._tick
        for row in reversed(rows):
            if row >= known or not where[row]:
                continue
            tick += 1
            soon = where[row] == _LOW + 1 or used[row] > self._oldest()
            append(_LOW if soon else _HIGH, row)
            used[row] = tick
        self._tick = tick

    def pass_by(self, row: int, now_s: float) -> None:
        """Count it as a use, as it is in use."""
        self.touch([row], now_s)

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves outside the low set, which shrinks when there are none."""
        del now_s
        lines, full = self._lines, self._tree.rows
        self._was_full = True
        while lines.lengths[_LOW] > full - full // _HIGH_SHARE:
            lines.append(_HIGH, lines.first(_LOW))

        def left(row: int, line: int, name: Hashable) -> None:
            del line
            self._remember(name, self._used[row], full)

        return self._offer(self._next, left)

    def _next(self) -> int:
        """Return the row whose turn it is, out of the low set if need be; -1 for none."""
        for line in (_READY, _HIGH, _LOW):
            row = self._lines.first(line)
            if row >= 0:
                return row
        return -1

    def _oldest(self) -> int:
        """Return when the least recently used row of the low set was used: the stack's bottom."""
        row = self._lines.first(_LOW)
        return self._used[row] if row >= 0 else 0

    def _remember(self, name: Hashable, used: int, full: int) -> None:
        """Keep when a block was last used, while that is in the stack and names are few."""
        if used > self._oldest():
            self._ghosts[name] = used
        while len(self._ghosts) > full:
            self._ghosts.popitem(last=False)
