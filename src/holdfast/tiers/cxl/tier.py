"""The CXL tier: slots in memory that is larger and slower than the host's.

Slots, runs and size classes are the host tier's; here is who leaves when they are all taken: the
record that was read or written longest ago, or, where memory has to move to another size of record,
all records of its run. What lies here does not survive the process: nothing on the medium is looked
at when it starts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from holdfast.blocks.envelope import read_header, record_bytes
from holdfast.buffers import ALIGNMENT, align_up
from holdfast.errors import FormatError, Outcome
from holdfast.tiers.base import NOWHERE, Dropped, Get, Place, Put, Reserved, Survivor, Usage
from holdfast.tiers.cxl.medium import SYS, CxlConfig, open_arena
from holdfast.tiers.gate import Gate
from holdfast.tiers.host import Budget, HostTier

_PATIENCE = 1_024
"""Records that are looked at for one that may go."""


class _Entry:
    """One record that lies here. A place that is written anew has a new one."""

    __slots__ = ("key", "nbytes")

    def __init__(self, key: bytes, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes


class CxlTier:
    """See `holdfast.tiers.base.Tier` for the promises. A place is an offset into the memory.

    Raises ConfigError when made, and has then taken no memory.
    """

    fleeting: ClassVar[Literal[True]] = True

    def __init__(self, config: CxlConfig, system: Path = SYS) -> None:
        self.name = config.name
        arena = open_arena(config, system)
        self._memory = np.frombuffer(arena.view, np.uint8)
        self._slots = HostTier(Budget(config.capacity_bytes), arena)
        self._lock = threading.Lock()
        self._gate = Gate()
        self._reserved: dict[Place, int] = {}
        self._writing: set[Place] = set()
        self._entries: OrderedDict[Place, _Entry] = OrderedDict()
        self._read_bytes = self._written_bytes = 0

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Find a slot for each size; who was used longest ago leaves for it."""
        dropped: list[Dropped] = []
        with self._lock:
            places = [self._take(size, dropped) for size in sizes]
        return Reserved(places, dropped)

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Copy records into their slots."""
        if not self._gate.enter():
            return [Outcome.GONE] * len(batch)
        try:
            outcomes = [self._write(put) for put in batch]
            self._slots.prefault()
            return outcomes
        finally:
            self._gate.leave()

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Copy records out of their slots; MISS for one that left meanwhile."""
        if not self._gate.enter():
            return [Outcome.GONE] * len(batch)
        try:
            return [self._read(get) for get in batch]
        finally:
            self._gate.leave()

    def free(self, places: Sequence[Place]) -> None:
        """Give slots back; one that is being written to when that is over."""
        with self._lock:
            for place in places:
                if place in self._entries:
                    del self._entries[place]
                elif self._reserved.pop(place, None) is None or place in self._writing:
                    continue
                self._slots.free([place])

    def survivors(self) -> Iterator[Survivor]:
        """Memory survives nothing."""
        return iter(())

    def usage(self) -> Usage:
        """Return fill and counters."""
        with self._lock:
            slots = self._slots.usage()
            return Usage(
                slots.capacity_bytes,
                slots.used_bytes,
                len(self._entries),
                self._read_bytes,
                self._written_bytes,
            )

    def close(self) -> None:
        """Let nobody in any more; what lies here is forgotten."""
        if self._gate.shut():
            self._slots.close()

    # Making room: all of this under the lock.

    def _take(self, size: int, dropped: list[Dropped]) -> Place:
        if self._gate.is_shut or not self._slots.slots(size):
            return NOWHERE
        place = self._slots.reserve([size]).places[0]
        while place == NOWHERE and self._drop_for(align_up(size), dropped):
            place = self._slots.reserve([size]).places[0]
        if place != NOWHERE:
            self._reserved[place] = size
        return place

    def _drop_for(self, slot_bytes: int, dropped: list[Dropped]) -> bool:
        """Drop the oldest record of this size, or first the run of an older one; False if none."""
        for place, entry in islice(self._entries.items(), _PATIENCE):
            if align_up(entry.nbytes) == slot_bytes:
                self._drop([place], dropped)
                return True
            if run := self._slots.beside(place):
                self._drop([Place(number * ALIGNMENT) for number in run], dropped)
                return True
        return False

    def _drop(self, places: Sequence[Place], dropped: list[Dropped]) -> None:
        dropped += [Dropped(self._entries.pop(place).key, place) for place in places]
        self._slots.free(places)

    # Moving bytes: none of this under the lock, and numpy copies without the interpreter's.

    def _write(self, put: Put) -> Outcome:
        try:
            header, _ = read_header(put.record)
        except FormatError:
            header = None
        whole = header is not None and record_bytes(header.payload_bytes) == len(put.record)
        with self._lock:
            if self._reserved.get(put.place) != len(put.record):
                return Outcome.GONE
            if header is None or not whole:
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
            self._slots.name_slot(put.place, put.place // ALIGNMENT)
            self._entries[put.place] = _Entry(header.key, len(put.record))
            self._written_bytes += len(put.record)
        return Outcome.OK

    def _read(self, get: Get) -> Outcome:
        with self._lock:
            entry = self._entries.get(get.place)
            if entry is None or entry.key != get.key or entry.nbytes > len(get.into):
                return Outcome.MISS
            self._entries.move_to_end(get.place)
        np.frombuffer(get.into, np.uint8)[: entry.nbytes] = self._slot(get.place, entry.nbytes)
        with self._lock:
            if self._entries.get(get.place) is not entry:
                return Outcome.MISS
            self._read_bytes += entry.nbytes
        return Outcome.OK

    def _slot(self, place: Place, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._memory[place : place + nbytes]
