"""FIFO queues of rows as linked lists: the data structure of queue-based policies."""

from __future__ import annotations

from array import array


class RowQueues:
    """Several queues of rows; a row is in at most one of them. 9 bytes a row, O(1) a call.

    Queues are numbered from 0. Each is a circular doubly linked list of nodes: node `i` is the head
    of queue `i`, and node `count + r` is row `r`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._after = array("i", range(count))
        self._before = array("i", range(count))
        self.where = bytearray()
        """[row] the queue it is in, counted from 1; 0 or no entry: none."""
        self.lengths = [0] * count
        """Number of rows in each queue."""

    def queue_of(self, row: int) -> int:
        """Return the queue that a row is in; -1 if it is in none."""
        return self.where[row] - 1 if row < len(self.where) else -1

    def first(self, queue: int) -> int:
        """Return the row at the front of a queue; -1 if it is empty."""
        node = self._after[queue]
        return node - self._count if node >= self._count else -1

    def append(self, queue: int, row: int) -> None:
        """Move a row to the end of a queue from the queue it is in, if any."""
        self._link(queue, row, end=queue)

    def prepend(self, queue: int, row: int) -> None:
        """Move a row to the front of a queue from the queue it is in, if any."""
        self.leave(row)
        self._link(queue, row, end=self._after[queue])

    def leave(self, row: int) -> None:
        """Remove a row from its queue, if it is in one."""
        queue = self.queue_of(row)
        if queue >= 0:
            self._unlink(self._count + row)
            self.where[row] = 0
            self.lengths[queue] -= 1

    def _link(self, queue: int, row: int, end: int) -> None:
        """Insert a row before node `end` of a queue."""
        where, lengths, before, after = self.where, self.lengths, self._before, self._after
        node = self._count + row
        if row >= len(where):
            self._grow(row)
        elif where[row]:
            self._unlink(node)
            lengths[where[row] - 1] -= 1
        last = before[end]
        before[node], after[node] = last, end
        after[last] = before[end] = node
        where[row] = queue + 1
        lengths[queue] += 1

    def _unlink(self, node: int) -> None:
        before, after = self._before[node], self._after[node]
        self._after[before], self._before[after] = after, before

    def _grow(self, row: int) -> None:
        missing = row + 1 - len(self.where)
        missing += len(self.where) >> 3
        self.where.extend(bytes(missing))
        self._after.frombytes(bytes(4 * missing))
        self._before.frombytes(bytes(4 * missing))
