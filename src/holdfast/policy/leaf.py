"""Leaf-first LRU: evict the least recently used block that no other block here builds upon.

A prefix is useless with a hole in front, so a block leaves only when its children have left. This
is the order of SGLang's radix cache (Zheng et al., "SGLang: Efficient Execution of Structured
Language Model Programs", 2024), and the baseline every other policy must beat. Do not use it where
one scan of contexts that never return floods the tier: admission has to keep those out.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

_ABSENT = 0
"""Last use of a row that is not here; uses count from 1."""

_ROW_MASK = 0xFFFF_FFFF


class LeafLru:
    """Exact leaf-first LRU: 12 bytes a row, a lazy heap of leaves, O(log leaves) an eviction."""

    def __init__(self) -> None:
        self._tick = 0
        self._used = array("Q")
        self._children = array("I")
        self._leaves: list[int] = []

    def insert(self, row: int, parent: int) -> None:
        """Add a row, just used."""
        self._grow(max(row, parent))
        if self._used[row] == _ABSENT and parent >= 0:
            self._children[parent] += 1
        self._tick += 1
        self._used[row] = self._tick
        if self._children[row] == 0:
            heapq.heappush(self._leaves, _entry(self._tick, row))

    def touch(self, rows: Sequence[int]) -> None:
        """Note one use of a chain's leading rows."""
        self._tick += 1
        used = self._used
        for row in rows:
            if row < len(used) and used[row] != _ABSENT:
                used[row] = self._tick

    def remove(self, row: int, parent: int) -> None:
        """Forget a row; its parent may become a leaf."""
        if row >= len(self._used) or self._used[row] == _ABSENT:
            return
        self._used[row] = _ABSENT
        if 0 <= parent < len(self._children) and self._children[parent] > 0:
            self._children[parent] -= 1
            if self._children[parent] == 0 and self._used[parent] != _ABSENT:
                heapq.heappush(self._leaves, _entry(self._used[parent], parent))

    def victims(self) -> Iterator[int]:
        """Yield leaves from the least recently used; rows the caller keeps stay in the order."""
        kept: list[int] = []
        try:
            while self._leaves:
                entry = heapq.heappop(self._leaves)
                row = entry & _ROW_MASK
                used = self._used[row]
                if used == _ABSENT or self._children[row]:
                    continue
                if entry != _entry(used, row):
                    heapq.heappush(self._leaves, _entry(used, row))
                    continue
                kept.append(entry)
                yield row
        finally:
            for entry in kept:
                row = entry & _ROW_MASK
                if entry == _entry(self._used[row], row):
                    heapq.heappush(self._leaves, entry)

    def _grow(self, row: int) -> None:
        missing = row + 1 - len(self._used)
        if missing > 0:
            missing += len(self._used) >> 3
            self._used.extend([_ABSENT] * missing)
            self._children.extend([0] * missing)


def _entry(used: int, row: int) -> int:
    return used << 32 | row
