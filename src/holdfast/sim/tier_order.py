"""The order in which tiers evict that do so by themselves, without an eviction policy of the store.

A disk tier reclaims its oldest region, whatever was read from it since (`tiers/disk/region_log`);
CXL memory evicts the least recently used record (`tiers/cxl/tier`). Neither knows prefixes, hints
or leases, so these orders do not promise what `holdfast.policy.base` promises: the head of a chain
may leave before its tail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence


class FifoOrder:
    """First in, first out: rows in the order of their insertion."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add rows that were written; a known row keeps its place."""
        del parents, names, now_s
        for row in rows:
            self._rows.setdefault(row)

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Ignore uses."""

    def pass_by(self, row: int, now_s: float) -> None:
        """Ignore that a row is in use."""

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Ignore hints."""

    def remove(self, row: int) -> None:
        """Remove a row, if it is there."""
        self._rows.pop(row, None)

    def forget(self, row: int) -> None:
        """Do nothing: a removed row leaves no trace."""

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield rows, the oldest first. The caller may remove the row that was yielded last."""
        del now_s
        passed: list[int] = []
        try:
            while self._rows:
                row = next(iter(self._rows))
                yield row
                if row in self._rows:  # skipped: it keeps its place
                    passed.append(row)
                    del self._rows[row]
        finally:
            for row in reversed(passed):
                self._rows[row] = None
                self._rows.move_to_end(row, last=False)


class LruOrder(FifoOrder):
    """Least recently used first: a row moves to the end when it is read."""

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Move the rows that were read to the end, in order."""
        del now_s
        for row in rows:
            if row in self._rows:
                self._rows.move_to_end(row)


TIER_ORDERS: Mapping[str, Callable[[], FifoOrder]] = {"fifo": FifoOrder, "lru": LruOrder}
"""The orders by name, for ladder files."""

KIND_ORDERS = {"cxl": "lru", "disk": "fifo", "pool": "fifo"}
"""The order of each kind of tier that evicts by itself; the targets of a pool write to disks."""
