"""The base class of queue-based policies: rows in FIFO queues, evicted leaf-first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Generator, Hashable, Sequence

from holdfast.policy.tree import PrefixTree

DEFERRED, READY = 2, 3
"""Queues of parents that are due: with children here, and without."""

_QUEUES = 4


class QueuePolicy(ABC):
    """Rows of a prefix tree in queues 0 and 1 of the policy, and in two for deferred parents.

    A parent that is due while it has children here moves to the queue `DEFERRED`, and to `READY`
    when the last of them is removed. `column` is the policy's own, one item a row; it grows with
    the tree.
    """

    def __init__(self, column: array[int] | bytearray) -> None:
        self._queues = [OrderedDict[int, None]() for _ in range(_QUEUES)]
        """A row is in at most one of them."""
        self._where = bytearray()
        """[row] the queue it is in, counted from 1; 0: none. The prefix tree extends it."""
        self._tree = PrefixTree(column, self._where)
        self._names: list[Hashable] = []

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add the new rows of a chain, the last one first, to the queues of `_queue_for`."""
        here = self._tree.here
        new = [row >= len(here) or not here[row] for row in rows]
        self._tree.add(rows, parents)
        self._names.extend([None] * (len(here) - len(self._names)))
        for row, name, is_new in zip(reversed(rows), reversed(names), reversed(new), strict=True):
            if is_new:
                self._names[row] = name
                self._append(self._queue_for(row, name), row)
            else:
                self.touch([row], now_s)

    @abstractmethod
    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Record one use of each row."""

    def pass_by(self, row: int, now_s: float) -> None:
        """Record a use of the row."""
        self.touch([row], now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:  # noqa: B027  # nothing to do
        """Ignore hints: these policies use past uses only."""

    def remove(self, row: int) -> None:
        """Remove a row; its deferred parent becomes ready if it has no other children."""
        if not self._tree.is_here(row):
            return
        parent = self._tree.take(row)
        self._leave(row)
        self._names[row] = None
        if parent < 0 or self._tree.children[parent]:
            return
        if self._where[parent] == DEFERRED + 1:
            self._append(READY, parent)

    def forget(self, row: int) -> None:
        self._tree.forget(row)

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves in the eviction order of the queues; those not evicted keep their places."""
        del now_s
        tree = self._tree
        full = tree.rows
        offered: list[tuple[int, int, Hashable]] = []
        try:
            while (row := self._next(full)) >= 0:
                queue, name = self._where[row] - 1, self._names[row]
                if tree.children[row]:
                    self._append(DEFERRED, row)
                    continue
                self._leave(row)
                offered.append((row, queue, name))
                yield row
        finally:
            for row, queue, _ in reversed(offered):
                if tree.here[row]:
                    self._append(queue, row)
                    self._queues[queue].move_to_end(row, last=False)
            for row, queue, name in offered:
                if not tree.here[row]:
                    self._remember(row, queue, name, full)

    def _first(self, queue: int) -> int:
        """Return the row at the front of a queue; -1 if it is empty."""
        return next(iter(self._queues[queue]), -1)

    def _append(self, queue: int, row: int) -> None:
        """Move a row to the end of a queue from the queue it is in, if any."""
        self._leave(row)
        self._queues[queue][row] = None
        self._where[row] = queue + 1

    def _leave(self, row: int) -> None:
        """Remove a row from its queue, if it is in one."""
        if self._where[row]:
            del self._queues[self._where[row] - 1][row]
            self._where[row] = 0

    @abstractmethod
    def _queue_for(self, row: int, name: Hashable) -> int:
        """Return the queue of a new row, and record its first use."""

    @abstractmethod
    def _next(self, full: int) -> int:
        """Return the next row that is due, -1 if there is none; `full` rows were here at first."""

    @abstractmethod
    def _remember(self, row: int, queue: int, name: Hashable, full: int) -> None:
        """Remember the name of an evicted row, which was in `queue`."""
