"""Leaf-first LRU: evict the least recently used block that has no children on this tier.

A block is useless without its whole prefix, so a block is evicted only after its children. This is
the order of SGLang's radix cache (Zheng et al., "SGLang: Efficient Execution of Structured Language
Model Programs", 2024), and the baseline that every other policy must beat. Do not use it alone if
scans of contexts that never return flood the tier: an admission policy must keep those out.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Hashable, Sequence

from holdfast.policy.tree import PrefixTree

_ROW_MASK = 0xFFFF_FFFF
_SPARE = 64
"""Stale entries that are always allowed in the heap."""


class LeafLru:
    """Exact leaf-first LRU: 29 bytes a row, a lazy heap of leaves, O(log leaves) an eviction.

    A use is recorded at the last row of its chain only, and passed to the parent when a child is
    removed, because a use of a block is also a use of its prefix. So the cost of a use does not
    depend on the length of the chain.
    """

    def __init__(self) -> None:
        self._tick = 0
        self._used = array("Q")
        self._tree = PrefixTree(self._used)
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
        if len(self._leaves) > 2 * tree.rows + _SPARE:  # remove stale entries
            known = {entry & _ROW_MASK for entry in self._leaves}
            self._leaves = [used[row] << 32 | row for row in known if tree.is_leaf(row)]
            heapq.heapify(self._leaves)

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Record one use of a chain's leading rows."""
        del now_s
        self._tick += 1
        tree = self._tree
        for row in reversed(rows):
            if tree.is_here(row):
                self._used[row] = self._tick
                if not tree.holes:
                    return

    def pass_by(self, row: int, now_s: float) -> None:
        """Record a use of the row."""
        self.touch([row], now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Ignore hints: LRU uses past uses only."""

    def remove(self, row: int) -> None:
        """Remove a row; its parent inherits its last use, and may become a leaf."""
        tree, used = self._tree, self._used
        parent = tree.take(row)
        if parent >= 0:
            used[parent] = max(used[parent], used[row])
            if not tree.children[parent]:
                heapq.heappush(self._leaves, used[parent] << 32 | parent)

    def forget(self, row: int) -> None:
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
