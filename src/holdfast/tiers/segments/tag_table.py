"""A hash table from 64-bit tags to 64-bit values in flat arrays: under 30 bytes an entry.

Open addressing with linear probing. A batch of tags is looked up and stored by whole-array
operations, so a chain of 2,048 blocks takes microseconds. Not thread-safe.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tags = npt.NDArray[np.uint64]
Values = npt.NDArray[np.int64]

ABSENT = -1
"""The value of a tag that is not in the table."""

_SLOTS_MIN = 1 << 10
_LOAD_MAX = 0.6


class TagTable:
    """Maps tags to values >= 0. Tag 0 counts as tag 1."""

    def __init__(self) -> None:
        self._tags: Tags = np.zeros(_SLOTS_MIN, np.uint64)
        self._values: Values = np.full(_SLOTS_MIN, ABSENT, np.int64)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Memory of the table in bytes."""
        return self._tags.nbytes + self._values.nbytes

    def find(self, tags: Tags) -> Values:
        """Return the value of each tag, or ABSENT."""
        tags = np.maximum(tags, np.uint64(1))
        at, found = self._first(tags), np.full(len(tags), ABSENT, np.int64)
        todo = np.arange(len(tags))
        while todo.size:
            slots = at[todo]
            there = self._tags[slots]
            hit = there == tags[todo]
            found[todo[hit]] = self._values[slots[hit]]
            todo = todo[(there != 0) & ~hit]
            at[todo] = (at[todo] + 1) & (len(self._tags) - 1)
        return found

    def put(self, tags: Tags, values: Values) -> None:
        """Store a value for each tag; a tag that is there, or comes twice, gets the later value."""
        self._grow(len(tags))
        tags = np.maximum(tags, np.uint64(1))
        at, todo = self._first(tags), np.arange(len(tags))
        while todo.size:
            slots = at[todo]
            free = self._tags[slots] == 0
            self._tags[slots[free]] = tags[todo[free]]
            self._used += len(np.unique(slots[free]))
            mine = self._tags[slots] == tags[todo]
            self._values[slots[mine]] = values[todo[mine]]
            todo = todo[~mine]
            at[todo] = (at[todo] + 1) & (len(self._tags) - 1)

    def keep(self, numbers: Values, shift: int) -> None:
        """Remove values `v` for which `v >> shift` is none of `numbers`, and the absent ones."""
        kept = self._values >= 0
        kept[kept] = np.isin(self._values[kept] >> shift, numbers)
        self._rebuild(self._tags[kept], self._values[kept])

    @property
    def fill(self) -> int:
        """Entries that take a slot, those removed by a value ABSENT included."""
        return self._used

    def _first(self, tags: Tags) -> npt.NDArray[np.int64]:
        return (tags & np.uint64(len(self._tags) - 1)).astype(np.int64)

    def _grow(self, more: int) -> None:
        if self._used + more > _LOAD_MAX * len(self._tags):
            kept = self._values >= 0
            self._rebuild(self._tags[kept], self._values[kept], more)

    def _rebuild(self, tags: Tags, values: Values, more: int = 0) -> None:
        slots = _SLOTS_MIN
        while len(tags) + more > _LOAD_MAX * slots:
            slots *= 2
        self._tags = np.zeros(slots, np.uint64)
        self._values = np.full(slots, ABSENT, np.int64)
        self._used = 0
        if len(tags):
            self.put(tags, values)
