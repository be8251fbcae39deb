"""Rows standing in lines: what queue-shaped policies are made of."""

from __future__ import annotations

from array import array


class Lines:
    """Some lines of rows; a row stands in one of them or in none. 9 bytes a row, O(1) each step.

    Lines are numbered from 0. The links are between nodes: line `i` is the ring through node `i`,
    and row `r` is node `count + r`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._after = array("i", range(count))
        self._before = array("i", range(count))
        self.where = bytearray()
        """[row] the line it stands in, counted from 1; 0 or no entry: none."""
        self.lengths = [0] * count
        """How many rows stand in each line."""

    def line(self, row: int) -> int:
        """Return the line that a row stands in; -1 for none."""
        return self.where[row] - 1 if row < len(self.where) else -1

    def first(self, line: int) -> int:
        """Return the row at the front of a line; -1 if nobody stands there."""
        node = self._after[line]
        return node - self._count if node >= self._count else -1

    def append(self, line: int, row: int) -> None:
        """Put a row at the end of a line; it leaves the one it stood in."""
        self._link(line, row, end=line)

    def prepend(self, line: int, row: int) -> None:
        """Put a row at the front of a line; it leaves the one it stood in."""
        self.leave(row)
        self._link(line, row, end=self._after[line])

    def leave(self, row: int) -> None:
        """Take a row out of its line, if it stands in one."""
        line = self.line(row)
        if line >= 0:
            self._unlink(self._count + row)
            self.where[row] = 0
            self.lengths[line] -= 1

    def _link(self, line: int, row: int, end: int) -> None:
        """Move a row in front of node `end` of a line."""
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
        where[row] = line + 1
        lengths[line] += 1

    def _unlink(self, node: int) -> None:
        before, after = self._before[node], self._after[node]
        self._after[before], self._before[after] = after, before

    def _grow(self, row: int) -> None:
        missing = row + 1 - len(self.where)
        missing += len(self.where) >> 3
        self.where.extend(bytes(missing))
        self._after.frombytes(bytes(4 * missing))
        self._before.frombytes(bytes(4 * missing))
