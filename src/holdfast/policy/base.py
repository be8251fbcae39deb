"""The eviction interface: a policy orders rows of the index, and never sees a block.

Pure: no clock, no I/O, no randomness. Time is the order of the calls. Not thread-safe: the store
calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Eviction(Protocol):
    """An order of rows by how little would be lost without them."""

    def insert(self, row: int, parent: int) -> None:
        """Add a row, just used; `parent` is the row of the block in front, -1 if unknown."""
        ...

    def touch(self, rows: Sequence[int]) -> None:
        """Note one use of these rows together: the leading blocks of one chain, in order."""
        ...

    def remove(self, row: int, parent: int) -> None:
        """Forget a row; a row that is not there is ignored."""
        ...

    def victims(self) -> Iterator[int]:
        """Yield rows, least valuable first. The caller removes those it takes, as it takes them."""
        ...
