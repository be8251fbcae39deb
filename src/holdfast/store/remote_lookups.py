"""Cached remote lookups: blocks that, as far as this node knows, only shared tiers hold.

Entries come from lookups, and from blocks that this node wrote to a shared tier and then evicted.
Shared tiers do not announce evictions, so an entry may be stale. The cache is bounded; a lookup of
a forgotten block asks the tier again.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_CACHED_LOOKUPS = 1 << 18
"""Maximum number of cached remote lookups; the oldest entries are dropped first."""


class RemoteLookups:
    """The rows of cached remote lookups, oldest first. The store calls it under its lock."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, row: int) -> None:
        """Add a row, or make it the youngest."""
        self._rows[row] = None
        self._rows.move_to_end(row)

    def forget(self, row: int) -> None:
        """Remove a row, if it is there."""
        self._rows.pop(row, None)

    def pop_excess(self, most: int) -> list[int]:
        """Remove up to `most` of the oldest entries beyond the bound; return their rows."""
        excess = min(most, len(self._rows) - MAX_CACHED_LOOKUPS)
        return [self._rows.popitem(last=False)[0] for _ in range(excess)]
