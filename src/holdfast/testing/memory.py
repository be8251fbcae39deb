"""Tiers in plain memory: the simplest complete implementations, for tests and as an example."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace, namespace_of
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
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.tiers.unverified_records import UnverifiedRecords, check_again

Name: TypeAlias = tuple[Namespace, bytes]
"""A block on a shared tier: its namespace and its key."""

Records: TypeAlias = dict[Name, tuple[Place, bytes]]
"""Content of a shared tier in memory: place and record by block."""


class MemoryTier:
    """Keeps records in a dict, and drops the oldest if it is full.

    `records`: the dict to use; a later tier with the same dict yields its records as survivors.
    """

    def __init__(
        self, capacity_bytes: int, records: dict[Place, bytes] | None = None, name: str = "memory"
    ) -> None:
        self.name = name
        self._capacity_bytes = capacity_bytes
        self._records = {} if records is None else records
        self._initial = list(self._records)
        self._sizes = {place: len(record) for place, record in self._records.items()}
        self._next = max(self._sizes, default=-1) + 1
        self._lock = threading.Lock()
        self._closed = False

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        """Return consecutive numbers as places; drop the oldest written records if it is full."""
        with self._lock:
            places = list[Place]()
            dropped = list[DroppedBlock]()
            for size in sizes:
                if not 0 < size <= self._capacity_bytes:  # eviction would not help
                    places.append(NOWHERE)
                    continue
                while self._records and sum(self._sizes.values()) + size > self._capacity_bytes:
                    oldest = next(iter(self._records))
                    record = self._records.pop(oldest)
                    del self._sizes[oldest]
                    header = header_of_record(record)
                    if header is not None:
                        dropped.append(DroppedBlock(header.key, oldest, namespace_of(header)))
                if sum(self._sizes.values()) + size > self._capacity_bytes:
                    places.append(NOWHERE)
                    continue
                place = Place(self._next)
                self._next += 1
                self._sizes[place] = size
                places.append(place)
            return ReservedPlaces(places, dropped)

    def candidates(self, nbytes: int) -> list[Candidate]:
        """Return the oldest records, which are dropped first."""
        with self._lock:
            free, found = self._capacity_bytes - sum(self._sizes.values()), list[Candidate]()
            for place, record in self._records.items():
                if free >= nbytes:
                    break
                free += self._sizes[place]
                header = header_of_record(record)
                if header is not None:
                    found.append(Candidate(header.key, place, namespace_of(header)))
            return found

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        with self._lock:
            return [self._write(put) for put in batch]

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Copy records out; another key at the place is a MISS."""
        with self._lock:
            return [self._read(get) for get in batch]

    def free(self, places: Sequence[Place]) -> None:
        with self._lock:
            for place in places:
                self._sizes.pop(place, None)
                self._records.pop(place, None)

    def survivors(self) -> Iterator[SurvivingRecord]:
        """Yield the records of the constructor's dict that were not deleted since."""
        for place in self._initial:
            header = header_of_record(self._records.get(place, b""))
            if header is not None:
                yield SurvivingRecord(header, place)

    def usage(self) -> TierUsage:
        with self._lock:
            used = sum(self._sizes.values())
            return TierUsage(self._capacity_bytes, used, len(self._records))

    def close(self) -> None:
        """Return GONE from every later call."""
        self._closed = True

    def _write(self, put: TierPut) -> Outcome:
        if self._closed or put.place not in self._sizes:
            return Outcome.GONE
        if len(put.record) != self._sizes[put.place]:
            self._records.pop(put.place, None)
            del self._sizes[put.place]
            return Outcome.CORRUPT
        self._records[put.place] = bytes(put.record)
        return Outcome.OK

    def _read(self, get: TierGet) -> Outcome:
        if self._closed:
            return Outcome.GONE
        record = self._records.get(get.place)
        if record is None or len(record) > len(get.into):
            return Outcome.MISS
        get.into[: len(record)] = record
        header = header_of_record(record)
        return Outcome.OK if header is None or header.key == get.key else Outcome.MISS


class SharedMemoryTier:
    """A `SharedTier` over a dict of records by namespace and key.

    `records` is the remote side: tiers with the same dict share its blocks. Records may be deleted
    from it at any time.
    """

    def __init__(self, records: Records, name: str = "shared memory") -> None:
        self.name = name
        self.records = records
        self.answers = True
        """False simulates a dead remote side."""
        self._closed = False
        self._unverified = UnverifiedRecords()
        self._counts = TransferCounts()

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Store a copy of each record under the namespace and key in its header."""
        return [self._write(put) for put in batch]

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        return [self._read(get) for get in batch]

    def held(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Return the number of consecutive blocks that are held from `start`."""
        del within_s
        found = 0
        if self._is_reachable():
            while start + found < len(keys) and (namespace, keys[start + found]) in self.records:
                found += 1
        return found

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        """Delete records that fail a check without a key."""
        self.delete(check_again(self.read, batch, self._unverified))

    def delete(self, batch: Sequence[TierGet]) -> None:
        for get in batch if self._is_reachable() else ():
            self.records.pop((get.namespace, get.key), None)

    def describe(self) -> dict[str, Any]:
        return {"tier": self.name, "members": [], "records": len(self.records)}

    def usage(self) -> TierUsage:
        """Return the bytes moved and the failures; the content belongs to all tiers of the dict."""
        return self._counts.usage()

    def close(self) -> None:
        """Return GONE from every later call."""
        self._closed = True

    def _is_reachable(self) -> bool:
        return self.answers and not self._closed

    def _write(self, put: TierPut) -> Outcome:
        if not self._is_reachable():
            self._counts.add(failures=1)
            return Outcome.GONE
        header = header_of_record(put.record)
        if header is None:
            return Outcome.CORRUPT
        namespace = namespace_of(header)
        _, held = self.records.get((namespace, header.key), (NOWHERE, b""))
        self._counts.add(written_bytes=len(put.record))
        if held and not self._unverified.is_replaced_by(namespace, header):
            return Outcome.OK
        self.records[namespace, header.key] = (put.place, bytes(put.record))
        self._unverified.unmark(namespace, header.key)
        return Outcome.OK

    def _read(self, get: TierGet) -> Outcome:
        if not self._is_reachable():
            self._counts.add(failures=1)
            return Outcome.GONE
        place, record = self.records.get((get.namespace, get.key), (NOWHERE, b""))
        if place != get.place or not 0 < len(record) <= len(get.into):
            return Outcome.MISS
        get.into[: len(record)] = record
        self._counts.add(read_bytes=len(record))
        return Outcome.OK
