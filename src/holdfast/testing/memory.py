"""Tiers in plain memory: the simplest true implementations, for tests and as an example."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.blocks.envelope import read_header
from holdfast.blocks.world import World
from holdfast.errors import FormatError, Outcome
from holdfast.tiers.base import NOWHERE, Dropped, Get, Place, Put, Reserved, Survivor, Usage


class MemoryTier:
    """Keeps records in a dict, drops the oldest to make room; `records` outlives it if asked to."""

    def __init__(
        self, capacity_bytes: int, records: dict[Place, bytes] | None = None, name: str = "memory"
    ) -> None:
        self.name = name
        self._capacity_bytes = capacity_bytes
        self._records = {} if records is None else records
        self._handed_over = list(self._records)
        self._sizes = {place: len(record) for place, record in self._records.items()}
        self._next = max(self._sizes, default=-1) + 1
        self._lock = threading.Lock()
        self._closed = False

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Number the records from zero on; drop the oldest written ones while there is no room."""
        with self._lock:
            places, dropped = [], []
            for size in sizes:
                dropped += self._make_room(size)
                if sum(self._sizes.values()) + size > self._capacity_bytes:
                    places.append(NOWHERE)
                    continue
                place = Place(self._next)
                self._next += 1
                self._sizes[place] = size
                places.append(place)
            return Reserved(places, dropped)

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Keep a copy of each record."""
        with self._lock:
            outcomes = []
            for put in batch:
                known = not self._closed and put.place in self._sizes
                if known:
                    self._records[put.place] = bytes(put.record)
                outcomes.append(Outcome.OK if known else Outcome.GONE)
            return outcomes

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Copy records out; another key at the place is a MISS."""
        with self._lock:
            return [self._read(get) for get in batch]

    def free(self, places: Sequence[Place]) -> None:
        """Forget records."""
        with self._lock:
            for place in places:
                self._sizes.pop(place, None)
                self._records.pop(place, None)

    def survivors(self) -> Iterator[Survivor]:
        """Yield the records handed over at construction, as far as they are still here."""
        for place in self._handed_over:
            try:
                yield Survivor(read_header(self._records[place])[0], place)
            except (FormatError, KeyError):
                continue

    def usage(self) -> Usage:
        """Return fill."""
        used = sum(self._sizes.values())
        return Usage(self._capacity_bytes, used, len(self._records))

    def close(self) -> None:
        """Answer GONE from now on."""
        self._closed = True

    def _read(self, get: Get) -> Outcome:
        if self._closed:
            return Outcome.GONE
        record = self._records.get(get.place)
        if record is None or len(record) != len(get.into):
            return Outcome.MISS
        get.into[:] = record
        try:
            return Outcome.OK if read_header(record)[0].key == get.key else Outcome.MISS
        except FormatError:
            return Outcome.OK

    def _make_room(self, size: int) -> list[Dropped]:
        dropped = []
        while self._records and sum(self._sizes.values()) + size > self._capacity_bytes:
            place = next(iter(self._records))
            record = self._records.pop(place)
            del self._sizes[place]
            try:
                dropped.append(Dropped(read_header(record)[0].key, place))
            except FormatError:
                continue
        return dropped


class SharedMemoryTier:
    """Records by key in a dict that several stores have in common.

    See `holdfast.tiers.base.Shared`. `records` is the far side: whoever is given the same one
    sees the same blocks. It may be emptied, or lose records, at any time.
    """

    def __init__(
        self, records: dict[bytes, tuple[Place, bytes]], name: str = "shared memory"
    ) -> None:
        self.name = name
        self.records = records
        self.answers = True
        """False: the far side is dead."""
        self._closed = False
        self._moved = [0, 0, 0]

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Reserve nothing: a dict grows."""
        return Reserved([Place(0)] * len(sizes), [])

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Keep a copy of each record under the key in its header."""
        return [self._write(put) for put in batch]

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Copy records out."""
        return [self._read(get) for get in batch]

    def free(self, places: Sequence[Place]) -> None:
        """Forget nothing."""

    def survivors(self) -> Iterator[Survivor]:
        """Yield nothing."""
        return iter(())

    def held(
        self, world: World, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Count the leading run."""
        del world, within_s
        found = 0
        if self._is_there():
            while start + found < len(keys) and keys[start + found] in self.records:
                found += 1
        return found

    def condemn(self, batch: Sequence[Get]) -> None:
        """Delete records."""
        for get in batch if self._is_there() else ():
            self.records.pop(get.key, None)

    def describe(self) -> dict[str, Any]:
        """Return how many records there are."""
        return {"tier": self.name, "members": [], "records": len(self.records)}

    def usage(self) -> Usage:
        """Return what was moved; what there is, is everybody's."""
        return Usage(0, 0, 0, *self._moved)

    def close(self) -> None:
        """Answer GONE from now on."""
        self._closed = True

    def _is_there(self) -> bool:
        return self.answers and not self._closed

    def _write(self, put: Put) -> Outcome:
        if not self._is_there():
            self._moved[2] += 1
            return Outcome.GONE
        try:
            key = read_header(put.record)[0].key
        except FormatError:
            return Outcome.CORRUPT
        self.records[key] = (put.place, bytes(put.record))
        self._moved[1] += len(put.record)
        return Outcome.OK

    def _read(self, get: Get) -> Outcome:
        if not self._is_there():
            self._moved[2] += 1
            return Outcome.GONE
        place, record = self.records.get(get.key, (NOWHERE, b""))
        if place != get.place or len(record) != len(get.into):
            return Outcome.MISS
        get.into[:] = record
        self._moved[0] += len(record)
        return Outcome.OK
