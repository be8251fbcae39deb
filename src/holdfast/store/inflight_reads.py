"""Reads from lower tiers into host slots that are queued or running, by row.

Not thread-safe: the store calls it under its lock. Waiting for the end of a read needs no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class InflightRead:
    """A read from a lower tier into a host slot.

    `waiting` counts the waiting fetches, without the one that started the read. `over` is set when
    the read succeeds or fails.
    """

    __slots__ = ("over", "waiting")

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waiting = 0


class InflightReads:
    """The reads in flight of one store. A row has at most one, and is pinned for as long."""

    def __init__(self) -> None:
        self._reads: dict[int, InflightRead] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def __contains__(self, row: int) -> bool:
        return row in self._reads

    def begin(self, row: int) -> None:
        """Record that a row is being read."""
        self._reads[row] = InflightRead()

    def end(self, row: int) -> None:
        """Record that the read of a row succeeded or failed, and wake the fetches that wait."""
        self._reads.pop(row).over.set()

    def of(self, rows: Iterable[int]) -> list[InflightRead]:
        """Return the reads in flight of these rows."""
        return [self._reads[row] for row in rows if row in self._reads]

    def is_awaited(self, rows: Iterable[int]) -> bool:
        """Return whether a fetch that did not start the reads of these rows waits for one."""
        return any(read.waiting for read in self.of(rows))
