"""In-memory state of one region of the disk tier: its records and the work in progress on it."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Collection

from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace

UNNAMED = bytes(KEY_BYTES)
"""Key of a record that is not written yet, or dead."""

_NO_SECTORS: set[int] = set()
_NO_HEADS: dict[int, bytes] = {}
_NO_NAMESPACES: list[Namespace | None] = []
# Shared by all regions without writes, and never modified. Most regions have none most of the time,
# and separate empty containers would cost as much as the 24 bytes of each record.


class RegionState(enum.Enum):
    """State of a region; `CLOSED` means that its footer was written, or failed."""

    FREE = "free"
    OPEN = "open"
    FULL = "full"
    CLOSED = "closed"
    UNSCANNED = "unscanned"


class Region:
    """One region. Its records have numbers in order of their first sector (`starts`).

    `is_doubtful`: a flush failed after records were written to it. `is_recovered`: an earlier
    process wrote its records, and may not have flushed them; those at the sectors `proven` were
    read and verified since.

    A record with 0 `sectors` is dead, one in `unwritten` is reserved only. `busy` counts scans and
    footer writes in progress. `headed` is whether the region's header is on the medium. `heads` are
    record headers that no footer lists yet. `namespace` applies to all records, unless `namespaces`
    has an item for each.
    """

    __slots__ = (
        "busy", "claimed", "footer_bytes", "generation", "headed", "heads", "is_doubtful",
        "is_recovered", "keys", "live", "namespace", "namespaces", "proven", "sectors", "starts",
        "state", "tail", "unwritten",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = RegionState.FREE
        self.busy = 0
        self.reset(0)

    def reset(self, generation: int) -> None:
        """Remove all records and set the generation of the region's life."""
        self.generation = generation
        self.tail = 1
        self.live = 0
        self.headed = False
        self.footer_bytes = 0
        self.is_doubtful = self.is_recovered = False
        self.proven = _NO_SECTORS
        self.keys = bytearray()
        self.starts = array("I")
        self.sectors = array("I")
        self.namespace: Namespace | None = None
        self.namespaces: list[Namespace | None] = _NO_NAMESPACES
        self.end_writes()

    def begin(self, generation: int) -> None:
        """Open the empty region for a new life."""
        self.reset(generation)
        self.state = RegionState.OPEN
        self.heads: dict[int, bytes] = {}
        self.unwritten: set[int] = set()
        self.claimed: set[int] = set()

    def end_writes(self) -> None:
        """Drop the state of writes: there are no more, and the footer has the record headers."""
        self.heads = _NO_HEADS
        self.unwritten = self.claimed = _NO_SECTORS

    @property
    def dead(self) -> int:
        """Number of dead records."""
        return len(self.starts) - self.live

    def alive(self) -> set[int]:
        """Return the first sectors of live records."""
        return {start for start, sectors in zip(self.starts, self.sectors, strict=True) if sectors}

    def keep(self, starts: Collection[int]) -> None:
        """Remove all records except those that start at these sectors."""
        kept = [number for number, start in enumerate(self.starts) if start in starts]
        self.keys = bytearray().join(self.key(number) for number in kept)
        self.starts = array("I", [self.starts[number] for number in kept])
        self.sectors = array("I", [self.sectors[number] for number in kept])
        if self.namespaces:
            self.namespaces = [self.namespaces[number] for number in kept]

    def find(self, sector: int) -> int:
        """Return the number of the record that starts at `sector`; -1 if none."""
        number = bisect_left(self.starts, sector)
        found = number < len(self.starts) and self.starts[number] == sector
        return number if found else -1

    def key(self, number: int) -> bytes:
        """Return a record's key."""
        return bytes(self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def namespace_of(self, number: int) -> Namespace | None:
        """Return the namespace of a record; None if it was never written."""
        return self.namespaces[number] if self.namespaces else self.namespace

    def set_namespace(self, number: int, namespace: Namespace) -> None:
        """Set the namespace of a record; keeps a list only if the records' namespaces differ."""
        if not self.namespaces:
            if self.namespace is None:
                self.namespace = namespace
            if self.namespace == namespace:
                return
            self.namespaces = [self.namespace] * len(self.starts)
        self.namespaces[number] = namespace

    def holds(self, number: int) -> bool:
        """Return whether a record can be read: it is written and not dead."""
        return bool(self.sectors[number]) and self.starts[number] not in self.unwritten
