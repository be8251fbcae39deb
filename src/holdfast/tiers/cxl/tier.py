"""The CXL tier: slots in memory that is larger and slower than the host's.

The host tier allocates the slots; this module adds eviction. If no slot is free, the least recently
used record is evicted or, if its run has slots of another size, all records of that run. Records do
not survive the process: a start does not read the medium.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.buffers import ALIGNMENT, align_up
from holdfast.errors import Outcome
from holdfast.tiers.base import (
    NOWHERE,
    Candidate,
    DroppedBlock,
    Place,
    ReservedPlaces,
    SurvivingRecord,
    TierGet,
    TierPut,
    TierUsage,
)
from holdfast.tiers.chunks import HostBudget
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.medium import open_arena
from holdfast.tiers.gate import MediumGate
from holdfast.tiers.host import HostTier

_VICTIM_SCAN_MAX = 1_024
"""Most records examined for a victim, least recently used first."""


class _Entry(NamedTuple):
    """One record held; each write of a place creates a new entry."""

    namespace: Namespace
    key: bytes
    nbytes: int


class CxlTier:
    """See `holdfast.tiers.base.LocalTier` for the promises. A place is an offset into the memory.

    The constructor raises ConfigError, without allocating memory.
    """

    volatile: ClassVar[Literal[True]] = True

    def __init__(self, options: CxlOptions, at: str = "tiers.1", name: str = "cxl") -> None:
        self.name = name
        arena = open_arena(options, at)
        self._memory = np.frombuffer(arena.view, np.uint8)
        self._budget = HostBudget(options.capacity)
        self._slots = HostTier(self._budget, arena)
        self._lock = threading.Lock()
        self._gate = MediumGate()
        self._reserved: dict[Place, int] = {}
        self._writing: set[Place] = set()
        self._entries: OrderedDict[Place, _Entry] = OrderedDict()
        self._read_bytes = self._written_bytes = 0

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        """Allocate a slot for each size; evict the least recently used records if none is free."""
        dropped: list[DroppedBlock] = []
        with self._lock:
            places = list[Place]()
            for size in sizes:
                place = NOWHERE
                if not self._gate.is_shut and self._slots.slots(size):
                    place = self._slots.reserve([size]).places[0]
                    while place == NOWHERE and self._evict_for(align_up(size), dropped):
                        place = self._slots.reserve([size]).places[0]
                if place != NOWHERE:
                    self._reserved[place] = size
                places.append(place)
        return ReservedPlaces(places, dropped)

    def candidates(self, nbytes: int) -> list[Candidate]:
        """Return the least recently used records; free slots of a run in use do not count."""
        with self._lock:
            free, found = self._budget.free_chunks * self._budget.chunk_bytes, list[Candidate]()
            for place, entry in self._entries.items():
                if free >= nbytes:
                    break
                found.append(Candidate(entry.key, place, entry.namespace))
                free += align_up(entry.nbytes)
            return found

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Copy records into their slots; CORRUPT for bytes that are no record of their length."""
        with self._gate.enter() as admitted:
            if not admitted:
                return [Outcome.GONE] * len(batch)
            outcomes = [self._write(put) for put in batch]
            self._slots.prefault()
            return outcomes

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Copy records out of their slots; MISS for a record evicted in the meantime."""
        with self._gate.enter() as admitted:
            return [self._read(get) if admitted else Outcome.GONE for get in batch]

    def free(self, places: Sequence[Place]) -> None:
        """Free slots; a slot that is being written is freed at the end of its write."""
        with self._lock:
            for place in places:
                if place in self._entries:
                    del self._entries[place]
                elif self._reserved.pop(place, None) is None or place in self._writing:
                    continue
                self._slots.free([place])

    def survivors(self) -> Iterator[SurvivingRecord]:
        return iter(())

    def usage(self) -> TierUsage:
        with self._lock:
            return msgspec.structs.replace(
                self._slots.usage(),
                records=len(self._entries),
                read_bytes=self._read_bytes,
                written_bytes=self._written_bytes,
            )

    def close(self) -> None:
        """Wait for calls in progress; all records are lost. The memory is freed with the tier."""
        if self._gate.shut():
            self._slots.close()

    # Eviction; the caller holds the lock.

    def _evict_for(self, slot_bytes: int, dropped: list[DroppedBlock]) -> bool:
        """Evict the least recently used record of this slot size, or the whole run of an older one.

        Returns False if no record may be evicted.
        """
        for victim, entry in islice(self._entries.items(), _VICTIM_SCAN_MAX):
            if align_up(entry.nbytes) == slot_bytes:
                places = [victim]
            else:
                places = [Place(name * ALIGNMENT) for name in self._slots.beside(victim)]
            if places:
                break
        else:
            return False
        for place in places:
            entry = self._entries.pop(place)
            dropped.append(DroppedBlock(entry.key, place, entry.namespace))
        self._slots.free(places)
        return True

    # Copies, made without the lock; numpy releases the GIL while it copies.

    def _write(self, put: TierPut) -> Outcome:
        header = header_of_record(put.record)
        whole = header is not None and header.stored_bytes == len(put.record)
        with self._lock:
            reserved = self._reserved.get(put.place)
            if reserved is None or put.place in self._writing:
                return Outcome.GONE
            if header is None or not whole or reserved != len(put.record):
                del self._reserved[put.place]
                self._slots.free([put.place])
                return Outcome.CORRUPT
            self._writing.add(put.place)
        self._slot(put.place, len(put.record))[:] = np.frombuffer(put.record, np.uint8)
        with self._lock:
            self._writing.remove(put.place)
            if self._reserved.pop(put.place, None) is None:
                self._slots.free([put.place])
                return Outcome.GONE
            self._slots.name_slots([put.place], [put.place // ALIGNMENT])
            self._entries[put.place] = _Entry(namespace_of(header), header.key, len(put.record))
            self._written_bytes += len(put.record)
        return Outcome.OK

    def _read(self, get: TierGet) -> Outcome:
        with self._lock:
            entry = self._entries.get(get.place)
            if entry is None or entry.key != get.key or entry.nbytes > len(get.into):
                return Outcome.MISS
            if get.is_use:
                self._entries.move_to_end(get.place)
        np.frombuffer(get.into, np.uint8)[: entry.nbytes] = self._slot(get.place, entry.nbytes)
        with self._lock:
            if self._entries.get(get.place) is not entry:
                return Outcome.MISS
            self._read_bytes += entry.nbytes
        return Outcome.OK

    def _slot(self, place: Place, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._memory[place : place + nbytes]
