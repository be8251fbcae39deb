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
from collections.abc import Hashable, Iterator, Sequence

from holdfast.policy.lines import Lines
from holdfast.policy.tree import Tree

_LOW, _HIGH, _ASIDE, _READY = range(4)
_HIGH_SHARE = 100
"""Rows for blocks outside the low set: the store divided by this."""


class Lirs:
    """A low set in order of use, a queue of the others, and names that left it; 34 bytes a row."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._lines = Lines(4)
        self._used = array("q")
        self._tick = 0
        self._names: list[Hashable] = []
        self._ghosts: OrderedDict[Hashable, int] = OrderedDict()
        self._was_full = False

    def insert(self, row: int, parent: int, name: Hashable, now_s: float) -> None:
        """Add a row: to the low set if its name came back soon, or if the store never was full."""
        if not self._tree.add(row, parent):
            self.touch([row], now_s)
            return
        missing = len(self._tree.here) - len(self._used)
        if missing:
            self._used.frombytes(bytes(8 * missing))
            self._names.extend([None] * missing)
        self._tick += 1
        soon = self._ghosts.pop(name, -1) > self._oldest()
        self._lines.append(_LOW if soon or not self._was_full else _HIGH, row)
        self._used[row] = self._tick
        self._names[row] = name

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

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Nothing: this order knows the past only."""

    def remove(self, row: int) -> None:
        """Take a row out; its parent may have waited for that."""
        if not self._tree.is_here(row):
            return
        parent = self._tree.take(row)
        self._lines.leave(row)
        self._names[row] = None
        if parent >= 0 and not self._tree.children[parent] and self._lines.line(parent) == _ASIDE:
            self._lines.append(_READY, parent)

    def forget(self, row: int) -> None:
        """Cut a row off from its children."""
        self._tree.forget(row)

    def victims(self, now_s: float) -> Iterator[int]:
        """Yield leaves outside the low set, which shrinks when there are none."""
        del now_s
        lines, tree, used, full = self._lines, self._tree, self._used, self._tree.rows
        self._was_full = True
        while lines.lengths[_LOW] > full - full // _HIGH_SHARE:
            lines.append(_HIGH, lines.first(_LOW))
        offered: list[tuple[int, int, Hashable]] = []
        try:
            while (row := self._next()) >= 0:
                line, name = lines.line(row), self._names[row]
                if tree.children[row]:
                    lines.append(_ASIDE, row)
                    continue
                lines.leave(row)
                offered.append((row, line, name))
                yield row
        finally:
            for row, line, _ in reversed(offered):
                if tree.here[row]:
                    lines.prepend(line, row)
            for row, _, name in offered:
                if not tree.here[row]:
                    self._remember(name, used[row], full)

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
