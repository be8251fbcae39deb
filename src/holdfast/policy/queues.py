"""What queue-shaped policies have in common: rows in lines, given up leaf-first, by name."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence

from holdfast.policy.lines import Lines
from holdfast.policy.tree import Tree


class Queues:
    """Rows of a tree in `count` lines; the last two are for parents that wait for their children.

    `beside` are the policy's own columns, one item a row: they grow with the tree.
    `aside`: a parent whose turn came while its children were here; `ready`: they have left.
    """

    def __init__(self, count: int, *beside: array[int] | bytearray) -> None:
        self._tree = Tree(*beside)
        self._lines = Lines(count)
        self._names: list[Hashable] = []
        self._aside, self._ready = count - 2, count - 1

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Nothing: this order knows the past only."""

    def remove(self, row: int) -> None:
        """Take a row out; its parent may have waited for that."""
        if not self._tree.is_here(row):
            return
        parent = self._tree.take(row)
        self._lines.leave(row)
        self._names[row] = None
        if parent < 0 or self._tree.children[parent]:
            return
        if self._lines.line(parent) == self._aside:
            self._lines.append(self._ready, parent)

    def forget(self, row: int) -> None:
        """Cut a row off from its children."""
        self._tree.forget(row)

    def _enter(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable]
    ) -> Iterator[tuple[int, Hashable, bool]]:
        """Add a chain to the tree; yield, from its end, rows, names, and whether they are new."""
        here = self._tree.here
        new = [row >= len(here) or not here[row] for row in rows]
        self._tree.add(rows, parents)
        self._names.extend([None] * (len(here) - len(self._names)))
        for row, name, is_new in zip(reversed(rows), reversed(names), reversed(new), strict=True):
            if is_new:
                self._names[row] = name
            yield row, name, is_new

    def _offer(
        self, following: Callable[[], int], left: Callable[[int, int, Hashable], None]
    ) -> Generator[int, None, None]:
        """Yield the leaves that `following` finds; those not taken keep their places.

        `left` is told row, line and name of every one that was taken.
        """
        lines, tree = self._lines, self._tree
        offered: list[tuple[int, int, Hashable]] = []
        try:
            while (row := following()) >= 0:
                line, name = lines.line(row), self._names[row]
                if tree.children[row]:
                    lines.append(self._aside, row)
                    continue
                lines.leave(row)
                offered.append((row, line, name))
                yield row
        finally:
            for row, line, _ in reversed(offered):
                if tree.here[row]:
                    lines.prepend(line, row)
            for row, line, name in offered:
                if not tree.here[row]:
                    left(row, line, name)
