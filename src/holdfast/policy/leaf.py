"""Leaf-first LRU: evict the least recently used block that no other block here builds upon.

A prefix is useless with a hole in front, so a block leaves only when its children have left. This
is the order of SGLang's radix cache (Zheng et al., "SGLang: Efficient Execution of Structured
Language Model Programs", 2024), and the baseline every other policy must beat. Do not use it where
one scan of contexts that never return floods the tier: admission has to keep those out.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Hashable, Sequence

from holdfast.policy.tree import Tree

_ROW_MASK = 0xFFFF_FFFF
_SPARE = 64
"""Stale entries that are always allowed in the heap."""


class LeafLru:
    """Exact leaf-first LRU: 29 bytes a row, a lazy heap of leaves, O(log leaves) an eviction.

    A use is noted at the last row of its chain only, and handed on to the parent with the removal
    of the last child: a row's children were never used later than the row itself. So a use costs
    the same for a chain of one block and of thousands.
    """

    def __init__(self) -> None:
        self._tick = 0
        self._used = array("Q")
        self._tree = Tree(self._used)
        self._leaves: list[int] = []

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add the rows of a chain, just used."""
        del names, now_s
        tree, used, tick = self._tree, self._used, self._tick
        tree.add(rows, parents)
        children = tree.children
        for row in reversed(rows):
            tick += 1
            used[row] = tick
            if not children[row]:
                heapq.heappush(self._leaves, tick << 32 | row)
        self._tick = tick
        if len(self._leaves) > 2 * tree.rows + _SPARE:
            self._tidy()

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Note one use of a chain's leading rows."""
        del now_s
        self._tick += 1
        tree = self._tree
        for row in reversed(rows):
            if tree.is_here(row):
                self._used[row] = self._tick
                if not tree.holes:
                    return

    def pass_by(self, row: int, now_s: float) -> None:
        """Count it as a use, as it is in use."""
        self.touch([row], now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Nothing: this order knows the past only."""

    def remove(self, row: int) -> None:
        """Take a row out; its parent was used no earlier, and may become a leaf."""
        tree, used = self._tree, self._used
        parent = tree.take(row)
        if parent >= 0:
            used[parent] = max(used[parent], used[row])
            if not tree.children[parent]:
                heapq.heappush(self._leaves, used[parent] << 32 | parent)

    def forget(self, row: int) -> None:
        """Cut a row off from its children."""
        self._tree.forget(row)

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves from the least recently used."""
        del now_s
        leaves, used, tree = self._leaves, self._used, self._tree
        kept: list[int] = []
        last = -1
        try:
            while leaves:
                entry = heapq.heappop(leaves)
                row = entry & _ROW_MASK
                if entry == last or not tree.here[row] or tree.children[row]:
                    continue
                if entry != used[row] << 32 | row:
                    heapq.heappush(leaves, used[row] << 32 | row)
                    continue
                last = entry
                yield row
                if tree.here[row]:
                    kept.append(entry)
        finally:
            if last >= 0 and tree.is_leaf(last & _ROW_MASK) and (kept[-1:] != [last]):
                kept.append(last)
            for entry in kept:
                heapq.heappush(leaves, entry)

    def _tidy(self) -> None:
        """Drop what is stale from the heap."""
        tree, used = self._tree, self._used
        rows = {entry & _ROW_MASK for entry in self._leaves}
        self._leaves = [used[row] << 32 | row for row in rows if tree.is_leaf(row)]
        heapq.heapify(self._leaves)
