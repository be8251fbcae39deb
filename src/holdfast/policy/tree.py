"""Which rows are here, and how many rows here build upon each: what makes a policy leaf-first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_NO_PARENT = -1
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


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
        self._parent = array("q")
        self._life = array("I")

    def add(self, rows: Sequence[int], parents: Sequence[int]) -> None:
        """Add the rows of a chain, each behind its parent (-1: none); what is here stays."""
        here, children, links = self.here, self.children, self._parent
        known = len(here)
        for row, parent in zip(rows, parents, strict=True):
            if row >= known or parent >= known:
                known = self._grow(max(row, parent))
            if here[row]:
                continue
            here[row] = 1
            self.rows += 1
            if children[row]:
                self.holes -= 1
            if parent < 0:
                links[row] = _NO_PARENT
                continue
            if not here[parent] and not children[parent]:
                self.holes += 1
            children[parent] += 1
            links[row] = self._life[parent] << _ROW_BITS | parent

    def take(self, row: int) -> int:
        """Take out a row, if it is here; return the row of its parent if that is here, else -1."""
        here, children = self.here, self.children
        if not 0 <= row < len(here) or not here[row]:
            return _NO_PARENT
        here[row] = 0
        self.rows -= 1
        if children[row]:
            self.holes += 1
        link = self._parent[row]
        if link < 0:
            return _NO_PARENT
        parent = link & _ROW_MASK
        if self._life[parent] != link >> _ROW_BITS:
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
        for column in (self.children, self._parent, self._life, *self._beside):
            column.extend(bytes(missing))
        return len(self.here)
