"""The tier interface: reserve, write, read, free, survive.

A tier keeps *records* (envelope header, payload, tag, padding to 4 KiB) at *places* it chooses. It
never looks behind the 128-byte header and never decides what is worth keeping: the store does.
`holdfast.testing.tier_contract` holds every promise below as a test; a vendor's tier proves itself
with one subclass of it.

Ownership: buffers passed in stay the caller's and are neither kept nor changed after the call
returns, except that `write` may re-stamp the 16-byte mark of the records it is given.
Threads: every method may be called from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NewType, Protocol, runtime_checkable

import msgspec

from holdfast.blocks.envelope import Header
from holdfast.blocks.world import World
from holdfast.errors import Outcome

Place = NewType("Place", int)
"""Where a tier put a record: a number >= 0 that only this tier understands."""

NOWHERE = Place(-1)
"""No place: the block is not on this tier, or there was no room."""


class Dropped(NamedTuple):
    """A block the tier gave up to make room. Its place must leave the index before any reuse."""

    key: bytes
    place: Place


class Reserved(NamedTuple):
    """What `reserve` found: one place per asked size (NOWHERE where none), and what it gave up."""

    places: list[Place]
    dropped: list[Dropped]


class Put(NamedTuple):
    """One record on its way into a tier: a reserved place and a whole, packed record."""

    place: Place
    record: memoryview


class Get(NamedTuple):
    """One record wanted: its place, its key and an aligned buffer of the record's length.

    A tier of this store's own needs no more; a shared one is also told the world.
    """

    place: Place
    key: bytes
    into: memoryview
    world: World | None = None


class Survivor(NamedTuple):
    """A record found on a tier at start, with its place."""

    header: Header
    place: Place


class Usage(msgspec.Struct, frozen=True):
    """How full a tier is, in bytes and records, and what it has refused or lost since start."""

    capacity_bytes: int
    used_bytes: int
    records: int
    read_bytes: int = 0
    written_bytes: int = 0
    failures: int = 0


class Tier(Protocol):
    """A place that keeps records. See the module's text for ownership and threads."""

    name: str

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Find places for records of these sizes (bytes, multiples of 4 KiB).

        State only: no I/O, so it may be called under the store's lock. A size the tier can never
        hold, or cannot hold now, gets NOWHERE. A reserved place holds nothing until written.
        """
        ...

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Write records to their places: OK, or FULL / GONE / CORRUPT where it failed.

        A place that failed is free again and holds nothing. After OK the record is readable.
        """
        ...

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Read records into their buffers: OK, MISS (reused or freed place), GONE (I/O error).

        OK promises only that the tier returned what lies there; the caller verifies.
        """
        ...

    def free(self, places: Sequence[Place]) -> None:
        """Forget these places; later reads of them are a MISS or another record, never an error."""
        ...

    def survivors(self) -> Iterator[Survivor]:
        """Yield what an earlier process left here, oldest first; empty for a volatile tier.

        Called once, after construction, while the tier already serves.
        """
        ...

    def usage(self) -> Usage:
        """Return current fill and counters."""
        ...

    def close(self) -> None:
        """Flush what must survive and release the medium. Later calls answer GONE."""
        ...


@runtime_checkable
class Fleeting(Tier, Protocol):
    """A tier of memory: nothing wears, and what lies there alone is gone with the process.

    So a copy there does not stand for one that still waits to be written further down, and what
    comes up from below it is offered to it on the way.
    """

    fleeting: ClassVar[Literal[True]]


@runtime_checkable
class Wiping(Tier, Protocol):
    """A tier whose medium keeps the bytes of what is freed, and that can overwrite them."""

    def wipe(self, survivor: Survivor) -> None:
        """Overwrite a survivor's record; call while `survivors` has not been asked for the next.

        One that can not be written stays as it is, and counts as a failure of the medium.
        """
        ...


@runtime_checkable
class Shared(Tier, Protocol):
    """A tier that other stores write to as well: what it holds is asked, not known.

    The place of a block is that of its segment (`segment_place`); `free` forgets nothing, and
    `survivors` is empty: whoever needs a block asks for it. A `read` may stop at a hole: what lies
    behind it in the batch may be a MISS too.
    """

    def held(
        self, world: World, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Return how many blocks of a chain are held in a row, from block `start` on.

        `keys` starts with the first block of the chain. Bounded in time, by the tier's own limit
        or `within_s` if that is less; not answered is 0.
        """
        ...

    def condemn(self, batch: Sequence[Get]) -> None:
        """Have records deleted that were read and did not verify, so that a write replaces them.

        Whatever lies in the buffers is of no interest. Bounded in time; nothing is promised.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return plain data about the far side for people to look at; may ask it, bounded."""
        ...


@runtime_checkable
class Reachable(Shared, Protocol):
    """A shared tier that knows whether its far side is there."""

    def reachable(self) -> bool:
        """Return whether anybody would be asked or written to just now; quick, changes nothing.

        While nobody would, a store neither asks nor prepares what it would write.
        """
        ...


@runtime_checkable
class Asked(Shared, Protocol):
    """A shared tier that is asked what it holds before anything is made ready for it."""

    def known(self, batch: Sequence[Put]) -> list[bool]:
        """Return which of these blocks are wherever a `write` would put them, by their headers.

        Those need not be sealed nor written. Bounded in time; not answered, or not worth a
        question, is False.
        """
        ...


@runtime_checkable
class Moving(Reachable, Protocol):
    """A shared tier whose far side comes and goes in parts, and that says what to write again."""

    def strayed(self, keys: Sequence[bytes], record_bytes: int) -> set[bytes]:
        """Return which of these were last read from where they no longer belong; each once.

        Only as many as may be written again just now: a change must not flood the far side.
        """
        ...

    def lost(self) -> Callable[[Place], bool] | None:
        """Return which places lost what lay there since this was last asked; None where none did.

        It may say so of a place that lost nothing: what is written again costs a question.
        """
        ...


def is_away(tier: Tier) -> bool:
    """Return whether a tier says that nobody is there to ask or to write to."""
    return isinstance(tier, Reachable) and not tier.reachable()


def segment_place(segment: bytes) -> Place:
    """Return the place of a segment's blocks on a shared tier: its 8 bytes as a number >= 0."""
    return Place(int.from_bytes(segment, "little") >> 1)
