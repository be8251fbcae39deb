"""Blocks that several writers fill together: ranks of one model, each with its heads.

Each writer reserves the same blocks with its part, the ranges of the payload that it writes. The
first reservation of a block allocates a slot, the others get the same slot. A block is complete
when the committed parts cover its payload. If that has not happened `PARTIAL_S` after the first
reservation, or if a writer gives up, the block is abandoned: nothing is published, and its slot is
freed once no writer can still write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.blocks.payload_part import covers, overlaps
from holdfast.limits import PARTIAL_S
from holdfast.store.leases import Generation, Reservation
from holdfast.tiers.base import NOWHERE, Place

_Name: TypeAlias = tuple[Namespace, bytes]


class PartialBlock:
    """One block that waits for parts; its slot belongs to it until it is complete or abandoned."""

    __slots__ = (
        "abandoned",
        "expires_at",
        "generation",
        "name",
        "place",
        "rests_until",
        "writers",
        "written",
    )

    def __init__(
        self, name: _Name, place: Place, generation: Generation, expires_at: float
    ) -> None:
        self.name = name
        self.place = place
        self.generation = generation
        self.expires_at = expires_at
        self.written = frozenset[bytes]()
        """Parts that were committed."""
        self.writers: dict[int, bytes] = {}
        """Parts that are being written, by the number of their reservation."""
        self.abandoned = False
        self.rests_until = 0.0

    @property
    def claimed(self) -> frozenset[bytes]:
        """Parts that were written or are being written."""
        return self.written.union(self.writers.values())


class JoinedBlock(NamedTuple):
    """How a writer takes part in a block: `block` is None if the block needs a slot.

    `wanted` False: another writer has written these bytes, or is writing them.
    """

    block: PartialBlock | None
    wanted: bool = True


class PartialBlocks:
    """The partial blocks of one store. Not thread-safe: the store calls it under its lock.

    `rest(reservation, until)` frees slots at a time of the store's clock.
    """

    def __init__(self, rest: Callable[[Reservation, float], None]) -> None:
        self._rest = rest
        self._waiting: dict[_Name, PartialBlock] = {}
        """Blocks that more writers may join, oldest first."""
        self._by_ticket: dict[int, list[PartialBlock | None]] = {}
        """Blocks of each open reservation, one for each of its keys."""
        self._waiting_bytes = 0
        self.abandoned = 0
        """Number of blocks that were abandoned so far."""

    def __len__(self) -> int:
        """Return the number of blocks that wait for parts."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Total size of the slots of blocks that wait for parts, in bytes."""
        return self._waiting_bytes

    def join(
        self, namespace: Namespace, keys: Sequence[bytes], part: bytes, generation: Generation
    ) -> list[JoinedBlock]:
        """Return for each key the block that a part can join, if there is one."""
        joined: list[JoinedBlock] = []
        seen = set[bytes]()
        for key in keys:
            if key in seen:
                joined.append(JoinedBlock(None, wanted=False))
                continue
            seen.add(key)
            block = self._waiting.get((namespace, key))
            if block is not None and block.generation != generation:  # dropped or erased since
                self._abandon(block, 0.0)
                block = None
            wanted = block is None or not overlaps(part, block.claimed)
            joined.append(JoinedBlock(block, wanted))
        return joined

    def open(
        self, number: int, reservation: Reservation, joined: Sequence[JoinedBlock], now_s: float
    ) -> None:
        """Enter a reservation whose places are final; a place without a block starts one."""
        blocks: list[PartialBlock | None] = []
        for key, place, found in zip(reservation.keys, reservation.places, joined, strict=True):
            block = found.block
            if place == NOWHERE:
                blocks.append(None)
                continue
            if block is None:
                name = reservation.namespace, key
                block = PartialBlock(name, place, reservation.generation, now_s + PARTIAL_S)
                self._waiting[name] = block
                self._waiting_bytes += reservation.namespace.slot_bytes
            block.writers[number] = reservation.part
            blocks.append(block)
        self._by_ticket[number] = blocks

    def commit(self, number: int, reservation: Reservation) -> Reservation:
        """Enter that a part was written; return the reservation of the blocks that it completed."""
        places = [NOWHERE] * len(reservation.keys)
        for i, block in enumerate(self._by_ticket.pop(number, ())):
            if block is None:
                continue
            part = block.writers.pop(number)
            if block.abandoned:
                self._end(block)
                continue
            block.written |= {part}
            if covers(block.written, reservation.namespace.raw_bytes):
                self._stop_waiting(block)
                places[i] = block.place
        return reservation._replace(places=places, part=b"")

    def abort(self, number: int, until: float) -> None:
        """Abandon the blocks of a writer that gave up, and may write until this time."""
        for block in self._by_ticket.pop(number, ()):
            if block is not None:
                del block.writers[number]
                self._abandon(block, until)

    def expire(self, now_s: float) -> None:
        """Abandon the blocks whose parts did not come in time."""
        while self._waiting:
            block = next(iter(self._waiting.values()))
            if block.expires_at > now_s:
                return
            self._abandon(block, 0.0)

    def end_domain(self, domain: bytes, until: float) -> None:
        """Abandon the blocks of a domain, whose reservations have ended; they rest this long."""
        blocks = {id(block): block for block in self._waiting.values()}
        for number, opened in list(self._by_ticket.items()):
            blocks |= {id(block): block for block in opened if block is not None}
            if any(block is not None and block.name[0].domain == domain for block in opened):
                del self._by_ticket[number]
        for block in blocks.values():
            if block.name[0].domain == domain:
                block.writers.clear()
                self._abandon(block, until)

    def _abandon(self, block: PartialBlock, until: float) -> None:
        block.rests_until = max(block.rests_until, until)
        if not block.abandoned:
            block.abandoned = True
            self.abandoned += 1
            self._stop_waiting(block)
        self._end(block)

    def _stop_waiting(self, block: PartialBlock) -> None:
        del self._waiting[block.name]
        self._waiting_bytes -= block.name[0].slot_bytes

    def _end(self, block: PartialBlock) -> None:
        """Free the slot of an abandoned block that no writer has any more."""
        if not block.writers:
            namespace, key = block.name
            slot = Reservation(namespace, [key], b"", 0, b"", [block.place], block.generation)
            self._rest(slot, block.rests_until)
