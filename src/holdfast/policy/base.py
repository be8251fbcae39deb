"""The interface of eviction policies, which order rows of the index and never see a block.

Pure: no clock, no I/O, no randomness. Callers pass the time, in seconds of the store's clock; it
never runs backwards. Not thread-safe: the store calls it under its lock. The contract test is
`holdfast.testing.policy_contract`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Protocol, runtime_checkable

NEVER = float("inf")
"""Expected time of the next use of a block whose session has closed."""


class EvictionPolicy(Protocol):
    """Orders rows by their value, and yields the least valuable ones as victims.

    A block is useless without its whole prefix, so a row is never a victim while the policy has a
    row of one of its children.
    """

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add the rows of a chain, in order, as just used; a known row counts as used.

        `parents[i]` is the row of the parent block of row `i`, -1 if unknown; it may be added later
        or never. `names[i]` names the block across namespaces, and stays the same if the block
        returns in another row. A chain may be added in parts, the last part first: the result is
        the same as in one call, including the order of `victims`.
        """

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Record one use of the leading blocks of one chain, in order. Ignores unknown rows."""

    def pass_by(self, row: int, now_s: float) -> None:
        """Move a row that was offered as a victim, but is in use, behind the other rows.

        Its hint stays. Not called while a `victims` generator is open.
        """

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Hint when a chain is needed again; `rows` are its leading rows, in order, as in `touch`.

        `at_s` is on the store's clock; NEVER means that the session has closed. A hint is valid
        until the chain's last known row is used again, and may be wrong. Policies may ignore it.
        """

    def remove(self, row: int) -> None:
        """Remove a row; its block may be added again in the same row. Ignores an unknown row."""

    def forget(self, row: int) -> None:
        """Forget a removed row: if it is added again, it is another block."""

    @abstractmethod
    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield rows, least valuable first, each at most once.

        The caller removes a row that it evicts before it asks for the next one, and inserts and
        touches nothing until it has closed the generator. Rows that it skips keep their place.
        """


@runtime_checkable
class Weighing(Protocol):
    """A policy that weighs blocks by their recompute cost as well as by their uses."""

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """Set the function that returns a row's worth: recompute time saved per byte, relative.

        A typical block has a worth of 1.
        """
