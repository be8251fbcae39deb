"""Which rows are here, and how many rows here build upon each: what makes a policy leaf-first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_NO_PARENT = -1
_HEAD = 0xFFFF_FFFF
"""Instead of the row of a parent: there is none."""


class Tree:
    """Rows and their parents' rows; 21 bytes a row.

    A row's children count while it is away too: a chain may come in from its end. `forget` cuts
    them off, because then the row's number is another block's. `beside` are a policy's own columns,
    which grow with those here.
    """

    def __init__(self, *beside: array[int] | list[float] | bytearray) -> None:
        self._beside = beside
        self.here = bytearray()
        """[row] 1 if the row is here; grown by `add`."""
        self.children: list[int] = []
        """[row] how many rows here build upon it; grown by `add`."""
        self.rows = 0
        """How many rows are here."""
        self.holes = 0
        """How many rows are away although rows here build upon them."""
        self._parent = array("I")
        self._life = array("I")
        """[row] how often it was cut off from its children."""
        self._known = array("I")
        """[row] the life of its parent that it builds upon."""
        self._cut = False
        """Whether any row was ever cut off: until then all lives are 0."""

    def add(self, rows: Sequence[int], parents: Sequence[int]) -> None:
        """Add the rows of a chain, each behind its parent (-1: none); what is here stays.

        Raises ValueError, and adds nothing, unless there are as many parents as rows.
        """
        if len(rows) != len(parents):
            raise ValueError(f"{len(rows)} rows and {len(parents)} parents: one of each a block")
        here, children, fronts, life = self.here, self.children, self._parent, self._life
        lives, cut, known, new = self._known, self._cut, len(here), 0
        for number, row in enumerate(rows):
            parent = parents[number]
            if row >= known or parent >= known:
                known = self._grow(max(row, parent))
            if here[row]:
                continue
            here[row] = 1
            new += 1
            if children[row]:
                self.holes -= 1
            if parent < 0:
                fronts[row] = _HEAD
                continue
            if not here[parent] and not children[parent]:
                self.holes += 1
            children[parent] += 1
            fronts[row] = parent
            if cut:
                lives[row] = life[parent]
        self.rows += new

    def take(self, row: int) -> int:
        """Take out a row, if it is here; return the row of its parent if that is here, else -1."""
        here, children = self.here, self.children
        if not 0 <= row < len(here) or not here[row]:
            return _NO_PARENT
        here[row] = 0
        self.rows -= 1
        if children[row]:
            self.holes += 1
        parent = self._parent[row]
        if parent == _HEAD or (self._cut and self._life[parent] != self._known[row]):
            return _NO_PARENT
        children[parent] -= 1
        if here[parent]:
            return parent
        if not children[parent]:
            self.holes -= 1
        return _NO_PARENT

    def forget(self, row: int) -> None:
        """Cut a row that is away off from its children: its number is another block's from now."""
        if row >= len(self.here) or self.here[row]:
            return
        if self.children[row]:
            self.holes -= 1
            self.children[row] = 0
        self._cut = True
        self._life[row] = (self._life[row] + 1) & (1 << 31) - 1

    def is_here(self, row: int) -> bool:
        """Whether a row is here."""
        return 0 <= row < len(self.here) and self.here[row] == 1

    def is_leaf(self, row: int) -> bool:
        """Whether a row is here and no row here builds upon it."""
        return self.is_here(row) and not self.children[row]

    def _grow(self, row: int) -> int:
        """Make the columns long enough for a row that they are too short for; return their length.

        In place: who has them at hand keeps them.
        """
        missing = row + 1 - len(self.here)
        missing += len(self.here) >> 3
        self.here.extend(bytes(missing))
        for column in (self.children, self._parent, self._life, self._known, *self._beside):
            column.extend(bytes(missing))
        return len(self.here)
