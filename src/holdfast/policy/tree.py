"""A prefix tree of the rows on a tier with child counts, so that policies can evict leaf-first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_NO_PARENT = -1
_HEAD = 0xFFFF_FFFF
"""Value of `_parent` for a row without a parent."""


class PrefixTree:
    """Rows, their parents' rows and child counts; 21 bytes a row.

    A row's children are counted even if the row itself is absent, because a chain may be added from
    its end. `forget` detaches them, because the row's number then belongs to another block.
    `columns` are a policy's own, which grow with the tree's.
    """

    def __init__(self, *columns: array[int] | list[float] | bytearray) -> None:
        self._columns = columns
        self.here = bytearray()
        """[row] 1 if the row is present; extended by `add`."""
        self.children: list[int] = []
        """[row] number of its children that are present; extended by `add`."""
        self.rows = 0
        """Number of rows present."""
        self.holes = 0
        """Number of absent rows with children that are present."""
        self._parent = array("I")
        self._generation = array("I")
        """[row] count of `forget` calls."""
        self._parent_generation = array("I")
        """[row] generation of its parent when the row was added."""
        self._forgot = False
        """Whether `forget` was ever called: until then all generations are 0."""

    def add(self, rows: Sequence[int], parents: Sequence[int]) -> None:
        """Add the rows of a chain, each after its parent (-1: none); rows already present stay.

        Raises ValueError, and adds nothing, if the numbers of rows and parents differ.
        """
        if len(rows) != len(parents):
            raise ValueError(f"{len(rows)} rows and {len(parents)} parents; give a parent per row")
        here, children, parent_of = self.here, self.children, self._parent
        generation, of_parent, forgot = self._generation, self._parent_generation, self._forgot
        known, new = len(here), 0
        for number, row in enumerate(rows):
            parent = parents[number]
            if row >= known or parent >= known:
                missing = max(row, parent) + 1 - known
                missing += known >> 3
                known += missing
                own = (here, children, parent_of, generation, of_parent)
                for column in (*own, *self._columns):
                    column.extend(bytes(missing))
            if here[row]:
                continue
            here[row] = 1
            new += 1
            if children[row]:
                self.holes -= 1
            if parent < 0:
                parent_of[row] = _HEAD
                continue
            if not here[parent] and not children[parent]:
                self.holes += 1
            children[parent] += 1
            parent_of[row] = parent
            if forgot:
                of_parent[row] = generation[parent]
        self.rows += new

    def take(self, row: int) -> int:
        """Remove a row if it is present; return its parent's row if that is present, else -1."""
        here, children = self.here, self.children
        if not 0 <= row < len(here) or not here[row]:
            return _NO_PARENT
        here[row] = 0
        self.rows -= 1
        if children[row]:
            self.holes += 1
        parent = self._parent[row]
        if parent == _HEAD:
            return _NO_PARENT
        if self._forgot and self._generation[parent] != self._parent_generation[row]:
            return _NO_PARENT
        children[parent] -= 1
        if here[parent]:
            return parent
        if not children[parent]:
            self.holes -= 1
        return _NO_PARENT

    def forget(self, row: int) -> None:
        """Detach an absent row from its children; its number may then name another block."""
        if row >= len(self.here) or self.here[row]:
            return
        if self.children[row]:
            self.holes -= 1
            self.children[row] = 0
        self._forgot = True
        self._generation[row] = (self._generation[row] + 1) & (1 << 31) - 1

    def is_here(self, row: int) -> bool:
        """Return whether a row is present."""
        return 0 <= row < len(self.here) and self.here[row] == 1

    def is_leaf(self, row: int) -> bool:
        """Return whether a row is present and has no children that are."""
        return self.is_here(row) and not self.children[row]
