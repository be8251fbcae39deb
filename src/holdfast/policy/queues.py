"""The base class of queue-based policies: rows in FIFO queues, evicted leaf-first."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence

from holdfast.policy.row_queues import RowQueues
from holdfast.policy.tree import PrefixTree


class QueuePolicy:
    """Rows of a prefix tree in `count` queues, the last two of which are for deferred parents.

    A parent that is due while it has children here moves to the `deferred` queue, and to `ready`
    when the last of them is removed. `columns` are the policy's own, one item a row; they grow with
    the tree.
    """

    def __init__(self, count: int, *columns: array[int] | bytearray) -> None:
        self._tree = PrefixTree(*columns)
        self._queues = RowQueues(count)
        self._names: list[Hashable] = []
        self._deferred, self._ready = count - 2, count - 1

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Ignore hints: these policies use past uses only."""

    def remove(self, row: int) -> None:
        """Remove a row; its deferred parent becomes ready if it has no other children."""
        if not self._tree.is_here(row):
            return
        parent = self._tree.take(row)
        self._queues.leave(row)
        self._names[row] = None
        if parent < 0 or self._tree.children[parent]:
            return
        if self._queues.queue_of(parent) == self._deferred:
            self._queues.append(self._ready, parent)

    def forget(self, row: int) -> None:
        """Detach a row from its children."""
        self._tree.forget(row)

    def _enter(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable]
    ) -> Iterator[tuple[int, Hashable, bool]]:
        """Add a chain to the tree; yield (row, name, is new) from its last row to its first."""
        here = self._tree.here
        new = [row >= len(here) or not here[row] for row in rows]
        self._tree.add(rows, parents)
        self._names.extend([None] * (len(here) - len(self._names)))
        for row, name, is_new in zip(reversed(rows), reversed(names), reversed(new), strict=True):
            if is_new:
                self._names[row] = name
            yield row, name, is_new

    def _offer(
        self, next_row: Callable[[], int], on_evicted: Callable[[int, int, Hashable], None]
    ) -> Generator[int, None, None]:
        """Yield the leaves that `next_row` returns; those not evicted keep their places.

        Calls `on_evicted` with row, queue and name of each evicted one.
        """
        queues, tree = self._queues, self._tree
        offered: list[tuple[int, int, Hashable]] = []
        try:
            while (row := next_row()) >= 0:
                queue, name = queues.queue_of(row), self._names[row]
                if tree.children[row]:
                    queues.append(self._deferred, row)
                    continue
                queues.leave(row)
                offered.append((row, queue, name))
                yield row
        finally:
            for row, queue, _ in reversed(offered):
                if tree.here[row]:
                    queues.prepend(queue, row)
            for row, queue, name in offered:
                if not tree.here[row]:
                    on_evicted(row, queue, name)
