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
        self._line = bytearray()
        self.lengths = [0] * count
        """How many rows stand in each line."""

    def line(self, row: int) -> int:
        """Return the line that a row stands in; -1 for none."""
        return self._line[row] - 1 if row < len(self._line) else -1

    def first(self, line: int) -> int:
        """Return the row at the front of a line; -1 if nobody stands there."""
        node = self._after[line]
        return node - self._count if node >= self._count else -1

    def append(self, line: int, row: int) -> None:
        """Put a row at the end of a line; it leaves the one it stood in."""
        self.leave(row)
        self._link(self._before[line], row, line)

    def prepend(self, line: int, row: int) -> None:
        """Put a row at the front of a line; it leaves the one it stood in."""
        self.leave(row)
        self._link(line, row, line)

    def leave(self, row: int) -> None:
        """Take a row out of its line, if it stands in one."""
        line = self.line(row)
        if line < 0:
            return
        node = self._count + row
        before, after = self._before[node], self._after[node]
        self._after[before], self._before[after] = after, before
        self._line[row] = 0
        self.lengths[line] -= 1

    def _link(self, before: int, row: int, line: int) -> None:
        """Put a row that stands nowhere behind node `before` of a line."""
        missing = row + 1 - len(self._line)
        if missing > 0:
            missing += len(self._line) >> 3
            self._line.extend(bytes(missing))
            self._after.frombytes(bytes(4 * missing))
            self._before.frombytes(bytes(4 * missing))
        node, after = self._count + row, self._after[before]
        self._before[node], self._after[node] = before, after
        self._after[before] = self._before[after] = node
        self._line[row] = line + 1
        self.lengths[line] += 1
