"""One region of the disk tier in memory: which records it has, and what is under way in it."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Collection

from holdfast.blocks.key import KEY_BYTES

UNNAMED = bytes(KEY_BYTES)
"""Key of a record that has none yet, or is dead."""

_NO_SECTORS: set[int] = set()
_NO_HEADS: dict[int, bytes] = {}
# Shared by all regions that nothing is written to, and never added to: most regions, most of the
# time, and empty containers of their own would cost as much as the records' 24 bytes.


class State(enum.Enum):
    """Where a region is in its life."""

    FREE = "free"
    OPEN = "open"
    FULL = "full"
    SEALED = "sealed"
    UNSCANNED = "unscanned"


class Region:
    """One region. A record with 0 sectors is dead; one in `unwritten` holds nothing yet."""

    __slots__ = (
        "busy", "claimed", "footer_bytes", "generation", "headed", "heads", "keys", "live",
        "sectors", "starts", "state", "tail", "unwritten",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = State.FREE
        self.busy = 0
        self.empty(0)

    def empty(self, generation: int) -> None:
        """Hold nothing, in this life."""
        self.generation = generation
        self.tail = 1
        self.live = 0
        self.headed = False
        self.footer_bytes = 0
        self.keys = bytearray()
        self.starts = array("I")
        self.sectors = array("I")
        self.rest()

    def begin(self, generation: int) -> None:
        """Start a life: open, nothing reserved, nothing held."""
        self.empty(generation)
        self.state = State.OPEN
        self.heads: dict[int, bytes] = {}
        self.unwritten: set[int] = set()
        self.claimed: set[int] = set()

    def rest(self) -> None:
        """Nothing is written here any more; the footer has the headers."""
        self.heads = _NO_HEADS
        self.unwritten = self.claimed = _NO_SECTORS

    @property
    def dead(self) -> int:
        """How many of its records are dead."""
        return len(self.starts) - self.live

    def alive(self) -> set[int]:
        """Return the sectors at which live records begin."""
        return {start for start, sectors in zip(self.starts, self.sectors, strict=True) if sectors}

    def keep(self, starts: Collection[int]) -> None:
        """Forget all records but those that begin at these sectors."""
        kept = [number for number, start in enumerate(self.starts) if start in starts]
        self.keys = bytearray().join(self.key(number) for number in kept)
        self.starts = array("I", [self.starts[number] for number in kept])
        self.sectors = array("I", [self.sectors[number] for number in kept])

    def find(self, sector: int) -> int:
        """Return the number of the record that starts at `sector`; -1 if none."""
        number = bisect_left(self.starts, sector)
        found = number < len(self.starts) and self.starts[number] == sector
        return number if found else -1

    def key(self, number: int) -> bytes:
        """Return a record's key."""
        return bytes(self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def holds(self, number: int) -> bool:
        """Whether a record is there to be read."""
        return bool(self.sectors[number]) and self.starts[number] not in self.unwritten
