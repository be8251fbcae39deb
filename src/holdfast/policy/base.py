"""The eviction interface: a policy orders rows of the index, and never sees a block.

Pure: no clock, no I/O, no randomness; time is passed in, in seconds of the store's clock, and never
runs backwards. Not thread-safe: the store calls it under its lock. The promises are tests:
`holdfast.testing.policy_contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Protocol, runtime_checkable

NEVER = float("inf")
"""When a block is expected whose session has closed."""


class Eviction(Protocol):
    """An order of rows by how little would be lost without them.

    A prefix is useless with a hole in front: no row is a victim while a row is here whose block
    builds upon it.
    """

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add the rows of a chain, in order, just used; one that is here already counts as used.

        `parents[i]` is the row of the block in front of row `i`, -1 if unknown; it may come later,
        or not at all. `names[i]` is the block's key: the same block has the same name when it comes
        back, perhaps in another row. A chain may come in parts, the last one first: that is the
        same as at once, down to the order of `victims`.
        """
        ...

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Note one use of these rows together: the leading blocks of one chain, in order.

        Rows that are not here are passed over.
        """
        ...

    def pass_by(self, row: int, now_s: float) -> None:
        """Put a row behind the others that was met among the victims, and that is in use.

        What is expected of it still is. Not while victims are being taken.
        """
        ...

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Note when a chain is needed again: its leading rows, in order, as for `touch`.

        `at_s` is on the store's clock; NEVER says that the session has closed. A hint holds until
        the chain's last row here is used again, and may be wrong. Policies may ignore it.
        """
        ...

    def remove(self, row: int) -> None:
        """Take a row out; its block may come back to the same row. An unknown row is ignored."""
        ...

    def forget(self, row: int) -> None:
        """Note that a row that is not here names no block any more: the next one is another."""
        ...

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield rows, least valuable first, each at most once.

        The caller removes those it takes, as it takes them, and inserts and touches nothing before
        it is done and has closed the generator; those that it leaves keep their place.
        """
        ...


@runtime_checkable
class Weighing(Protocol):
    """What a policy also offers that minds what blocks are worth, not only when they are used."""

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """From now on ask `worth(row)`: recompute seconds saved a byte, against a usual 1."""
        ...
