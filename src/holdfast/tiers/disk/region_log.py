"""Allocation of records in the regions of a disk tier: state only, no I/O and no lock.

    reserve ---> claim ---> finish          one record: reserved, being written, held or dead
    FREE -> OPEN -> FULL -> CLOSED -> FREE  one region; UNSCANNED after a restart until its scan

The caller holds the tier's lock around every call. A region is reclaimed only while no write,
footer or scan of it is in progress. A record takes 24 bytes of memory (key, first sector, number of
sectors), because it counts toward the store's budget per block. Record headers are kept until the
footer lists them. A region stores the namespace of its records once, or one for each record if they
differ.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, Header, write_header
from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.tiers.base import (
    NOWHERE,
    Candidate,
    DroppedBlock,
    Place,
    ReservedPlaces,
    SurvivingRecord,
)
from holdfast.tiers.disk.region import (
    FREED_PER_REGION,
    SECTOR,
    ListedEntry,
    RegionEntry,
    RegionGeometry,
    RegionLife,
    RegionRow,
    footer_bytes,
)
from holdfast.tiers.disk.region_table import UNNAMED, Region, RegionState


class RecordExtent(NamedTuple):
    """Location of a record: the life that it belongs to, its offset and length in bytes."""

    life: RegionLife
    offset: int
    nbytes: int


class ListedRecord(NamedTuple):
    """A record that a region lists: its place and extent, its key and namespace."""

    place: Place
    extent: RecordExtent
    key: bytes
    namespace: Namespace


class RegionLog:
    """Places in regions; the oldest region is reclaimed first. All sizes are exact, in bytes.

    `first_place`: the place of the first sector of region 0. A place outside the regions holds
    nothing, so logs with places of their own never mistake each other's.
    """

    def __init__(
        self, geometry: RegionGeometry, uuid: bytes, first_generation: int, first_place: int = 0
    ) -> None:
        self.geometry = geometry
        self._first_place = first_place
        self.used_bytes = 0
        self.records = 0
        self._uuid = uuid
        self._next_generation = first_generation
        self._regions = [Region() for _ in range(geometry.region_count)]
        self._free = deque(range(geometry.region_count))
        self._taken: dict[int, None] = {}
        self._open: int | None = None
        self._footers_due: deque[int] = deque()
        self._unflushed: set[int] = set()
        """Regions with headers or records that were written since the last flush began."""
        self._flushing: set[int] = set()
        """Regions whose records are being flushed."""

    # Writing: reserve, claim, finish.

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        """Append places to the open region; open the next region when it is full."""
        dropped: list[DroppedBlock] = []
        return ReservedPlaces([self._reserve_one(size, dropped) for size in sizes], dropped)

    def candidates(self, nbytes: int) -> list[Candidate]:
        """Return the records of the regions that are reclaimed for `nbytes` more, oldest first."""
        free = len(self._free) * self._region_bytes_free(None)
        if self._open is not None:
            free += self._region_bytes_free(self._regions[self._open])
        found = list[Candidate]()
        for index in self._taken:
            if free >= nbytes:
                break
            region = self._regions[index]
            if self._idle(region):
                found += [Candidate(*block) for block in self._held(index)]
                free += self._region_bytes_free(None)
        return found

    def claim(self, place: Place) -> RecordExtent | None:
        """Start writing a reserved place; None if it is not reserved, or already claimed."""
        index, region, number = self._locate(place)
        if region is None:
            return None
        sector = region.starts[number]
        if sector not in region.unwritten or sector in region.claimed:
            return None
        region.claimed.add(sector)
        return RecordExtent(self._life(index), self.offset(place), region.sectors[number] * SECTOR)

    def finish(self, place: Place, header: Header | None) -> None:
        """End a claimed write of a record with this header; None if the write failed."""
        index, region, number = self._locate(place, dead=True)
        if region is None:
            return
        sector = region.starts[number]
        region.unwritten.discard(sector)
        region.claimed.discard(sector)
        if header is None:
            region.sectors[number] = 0
        elif region.sectors[number]:
            region.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] = header.key
            region.set_namespace(number, namespace_of(header))
            head = memoryview(bytearray(HEADER_BYTES))
            write_header(head, header, region.generation)
            region.heads[number] = bytes(head)
            self._count(region, number, 1)
            self._unflushed.add(index)
        self._advance(index)

    def has_header(self, life: RegionLife) -> bool:
        """Return whether the region's header of this life was written."""
        return self._regions[life.region].headed

    def header_written(self, life: RegionLife) -> None:
        """Record that the region's header of this life was written."""
        self._regions[life.region].headed = True
        self._unflushed.add(life.region)

    def header_failed(self, life: RegionLife) -> None:
        """Record that the region's header could not be written: it takes no more records."""
        if self._open == life.region:
            self.close_open()

    # Reading.

    def held(self, place: Place, key: bytes, max_bytes: int) -> RecordExtent | None:
        """Return the record of `key` at a place; None if not held or longer than `max_bytes`."""
        index, region, number = self._locate(place)
        if region is None or not region.holds(number) or region.key(number) != key:
            return None
        nbytes = region.sectors[number] * SECTOR
        if nbytes > max_bytes:
            return None
        return RecordExtent(self._life(index), self.offset(place), nbytes)

    def is_current(self, life: RegionLife) -> bool:
        """Return whether a region is still in this life."""
        return self._regions[life.region].generation == life.generation

    def offset(self, place: Place) -> int:
        """Return the offset of a place in the file, in bytes."""
        return self.geometry.regions_at + (place - self._first_place) * SECTOR

    # Flushes, one at a time.

    def begin_flush(self) -> None:
        """Note that all records that are written by now are flushed; `end_flush` must follow."""
        self._flushing |= self._unflushed
        self._unflushed = set()

    def end_flush(self, *, failed: bool) -> None:
        """Note the end of a flush. If it failed, records since the last one are never safe again.

        The medium may have dropped any of them, and says so once. Their regions, and those that
        are being written to, become doubtful and take no more records.
        """
        suspects, self._flushing = self._flushing, set()
        if not failed:
            return
        suspects |= self._unflushed
        suspects.update(index for index in self._taken if self._regions[index].claimed)
        self._unflushed = set()
        for index in suspects:
            self._regions[index].is_doubtful = True
        if self._open in suspects:
            self.close_open()

    def life_at(self, place: Place) -> RegionLife | None:
        """Return the life of the region that holds a written record at a place; None without."""
        index, region, number = self._locate(place)
        return self._life(index) if region is not None and region.holds(number) else None

    def is_safe(self, place: Place, life: RegionLife) -> bool:
        """Return whether a record that was flushed in a life of its region is on the medium."""
        index, region, number = self._locate(place)
        if region is None or not region.holds(number) or self._life(index) != life:
            return False
        is_proven = not region.is_recovered or region.starts[number] in region.proven
        return is_proven and not region.is_doubtful

    def to_prove(self, place: Place) -> ListedRecord | None:
        """Return the record there if an earlier process wrote it and it is not verified yet."""
        index, region, number = self._locate(place)
        if region is None or not region.is_recovered or region.is_doubtful:
            return None
        namespace = region.namespace_of(number)
        if not region.holds(number) or namespace is None or region.starts[number] in region.proven:
            return None
        nbytes = region.sectors[number] * SECTOR
        extent = RecordExtent(self._life(index), self.offset(place), nbytes)
        return ListedRecord(place, extent, region.key(number), namespace)

    def prove(self, listed: ListedRecord) -> None:
        """Note that a record of an earlier process was read from the medium and verified."""
        _, region, number = self._locate(listed.place)
        if region is None or not self.is_current(listed.extent.life):
            return
        if not region.proven:
            region.proven = set()
        region.proven.add(region.starts[number])

    # Freeing.

    def free(self, places: Iterable[Place]) -> None:
        """Mark records dead; a region without live records becomes free."""
        for place in places:
            index, region, number = self._locate(place)
            if region is None:
                continue
            sector = region.starts[number]
            if sector not in region.unwritten:
                self._count(region, number, -1)
                region.heads.pop(number, None)
            elif sector not in region.claimed:
                region.unwritten.discard(sector)
            region.sectors[number] = 0
            self._advance(index)

    # Footers and snapshots.

    def next_full(self) -> tuple[RegionLife, list[RegionEntry]] | None:
        """Return the life of a region whose footer is due, and the footer's entries.

        Returns None if there is no such region; otherwise `footer_written` must follow.
        """
        while self._footers_due:
            index = self._footers_due.popleft()
            region = self._regions[index]
            if region.state is not RegionState.FULL or region.unwritten or region.busy:
                continue
            region.busy += 1
            entries = [
                RegionEntry(region.heads[n], region.starts[n], region.sectors[n])
                for n in sorted(region.heads)
            ]
            return self._life(index), entries
        return None

    def footer_written(self, life: RegionLife, nbytes: int) -> None:
        """Close a region whose footer has `nbytes`, 0 if it could not be written.

        Without a footer the region stays readable, and a restart scans it.
        """
        region = self._regions[life.region]
        region.busy -= 1
        region.state = RegionState.CLOSED
        region.footer_bytes = nbytes
        region.end_writes()
        self._advance(life.region)

    def close_open(self) -> None:
        """End reservations in the open region, if any; its footer waits for writes in progress."""
        index, self._open = self._open, None
        if index is not None:
            self._regions[index].state = RegionState.FULL
            self._advance(index)

    def close_freed(self) -> None:
        """End reservations in the open region if a record in it was freed."""
        if self._open is not None and not all(self._regions[self._open].sectors):
            self.close_open()

    def frees_without_footer(self) -> bool:
        """Return whether a record was freed in a region without a footer: a scan would find it."""
        without = (RegionState.OPEN, RegionState.FULL)
        taken = (self._regions[index] for index in self._taken)
        return any(region.state in without and not all(region.sectors) for region in taken)

    def rows(self) -> list[RegionRow]:
        """Return the rows of a snapshot, one per region."""
        return [
            RegionRow(r.generation, r.footer_bytes, int(r.state is not RegionState.FREE))
            for r in self._regions
        ]

    def freed(self) -> list[tuple[int, int]]:
        """Return the dead records of closed regions, youngest region first.

        Returns at most as many as a snapshot has room for, and skips regions without dead records,
        because reads and writes wait for the caller's lock.
        """
        dead = (
            (index, region.starts[n])
            for index in reversed(self._taken)
            if (region := self._regions[index]).state is RegionState.CLOSED and region.dead
            for n in range(len(region.starts))
            if not region.sectors[n]
        )
        return list(itertools.islice(dead, FREED_PER_REGION * self.geometry.region_count))

    def dead(self) -> dict[RegionLife, int]:
        """Return the number of dead records of each closed region with a footer."""
        return {
            self._life(index): region.dead
            for index in self._taken
            if (region := self._regions[index]).state is RegionState.CLOSED and region.footer_bytes
        }

    def begin_prune(self, life: RegionLife) -> set[int] | None:
        """Return the first sectors of a closed region's live records; `end_prune` must follow.

        Returns None if the region is not closed, or no longer in this life.
        """
        region = self._regions[life.region]
        if region.state is not RegionState.CLOSED or region.generation != life.generation:
            return None
        region.busy += 1
        return region.alive()

    def end_prune(self, life: RegionLife, alive: Collection[int], written: int) -> None:
        """End a rewrite: the footer lists `alive` in `written` bytes; 0 if it was not rewritten."""
        region = self._regions[life.region]
        region.busy -= 1
        if written:
            region.footer_bytes = written
            region.keep(alive)
        self._advance(life.region)

    # Recovery.

    def add_unscanned(
        self, generations: Sequence[int], empty: Collection[int] = ()
    ) -> list[RegionLife]:
        """Add the regions of an earlier process, to be scanned; return their lives, oldest first.

        `generations` is by region, 0 if the region was never used. `empty` regions are free and
        keep the generation of the life that was freed.
        """
        lives = [
            RegionLife(self._uuid, i, g) for i, g in enumerate(generations) if g and i not in empty
        ]
        lives.sort(key=lambda life: life.generation)
        for index in empty:
            self._regions[index].generation = generations[index]
        for life in lives:
            region = self._regions[life.region]
            region.state, region.generation = RegionState.UNSCANNED, life.generation
            self._taken[life.region] = None
        self._free = deque(i for i, g in enumerate(generations) if not g or i in empty)
        return lives

    def retire(self, index: int) -> None:
        """Exclude a free region from use, because its header cannot be read."""
        self._free.remove(index)

    def begin_scan(self, life: RegionLife) -> bool:
        """Protect an unscanned region from reclaim; False if it was reclaimed before."""
        region = self._regions[life.region]
        if region.state is not RegionState.UNSCANNED or region.generation != life.generation:
            return False
        region.busy += 1
        return True

    def load(
        self, life: RegionLife, found: Sequence[ListedEntry], freed: set[int], footer: int
    ) -> list[SurvivingRecord]:
        """Add the records that a footer or scan found to a region; return the live ones.

        `freed` are the first sectors of records freed before the restart. `footer` is the size of
        the footer in bytes, 0 if it must still be written.
        """
        region = self._regions[life.region]
        by_place = sorted(found, key=lambda listed: listed.entry.sector)
        entries = [entry for _, entry in by_place]
        first = self._first_of(life.region)
        alive = [
            SurvivingRecord(header, Place(first + entry.sector))
            for header, entry in by_place
            if entry.sector not in freed
        ]
        region.keys = bytearray().join(
            UNNAMED if entry.sector in freed else header.key for header, entry in by_place
        )
        region.starts = array("I", [entry.sector for entry in entries])
        lengths = [0 if entry.sector in freed else entry.sectors for entry in entries]
        region.sectors = array("I", lengths)
        for number, (header, _) in enumerate(by_place):
            region.set_namespace(number, namespace_of(header))
        region.live = len(alive)
        self.records += len(alive)
        self.used_bytes += sum(lengths) * SECTOR
        if not footer:
            region.heads = {n: entry.head for n, entry in enumerate(entries) if lengths[n]}
        region.footer_bytes = footer
        region.is_recovered = True
        region.state = RegionState.CLOSED if footer else RegionState.FULL
        return alive

    def end_scan(self, life: RegionLife) -> None:
        """End the protection of `begin_scan`."""
        self._regions[life.region].busy -= 1
        self._advance(life.region)

    # Internal.

    def _reserve_one(self, size: int, dropped: list[DroppedBlock]) -> Place:
        if size <= 0 or size % SECTOR or size > self.geometry.stored_bytes_max:
            return NOWHERE
        if self._open is not None:
            region = self._regions[self._open]
            footer = footer_bytes(len(region.starts) + 1)
            if region.tail * SECTOR + size + footer > self.geometry.region_bytes:
                self.close_open()
        if self._open is None and not self._open_next(dropped):
            return NOWHERE
        index = self._open
        assert index is not None  # noqa: S101 - _open_next has just opened one
        region = self._regions[index]
        place = Place(self._first_of(index) + region.tail)
        region.keys += UNNAMED
        region.starts.append(region.tail)
        if region.namespaces:
            region.namespaces.append(None)
        region.sectors.append(size // SECTOR)
        region.unwritten.add(region.tail)
        region.tail += size // SECTOR
        return place

    def _open_next(self, dropped: list[DroppedBlock]) -> bool:
        """Open a free region, or reclaim the oldest idle one; False if there is none."""
        if self._free:
            index = self._free.popleft()
        else:
            oldest = next((i for i in self._taken if self._idle(self._regions[i])), None)
            if oldest is None:
                return False
            index = oldest
            dropped += self._evict(index)
        region = self._regions[index]
        region.begin(self._next_generation)
        self._next_generation += 1
        self._unflushed.discard(index)
        self._flushing.discard(index)
        self._taken[index] = None
        self._open = index
        return True

    @staticmethod
    def _idle(region: Region) -> bool:
        return not (region.busy or region.unwritten or region.state is RegionState.OPEN)

    def _evict(self, index: int) -> list[DroppedBlock]:
        """Free a region; return the blocks that it held."""
        region, evicted = self._regions[index], list(self._held(index))
        for number in range(len(region.starts)):
            if region.holds(number):
                self._count(region, number, -1)
        del self._taken[index]
        region.state = RegionState.FREE
        return evicted

    def _held(self, index: int) -> Iterator[DroppedBlock]:
        """Yield the blocks that a region holds."""
        region, base = self._regions[index], self._first_of(index)
        for number in range(len(region.starts)):
            if region.holds(number):
                namespace = region.namespace_of(number)
                assert namespace is not None  # noqa: S101 - a record that is held was written
                yield DroppedBlock(
                    region.key(number), Place(base + region.starts[number]), namespace
                )

    def _region_bytes_free(self, region: Region | None) -> int:
        """Return the bytes that records can still take in a region; None: in an empty one."""
        taken, records = (
            (SECTOR, 0) if region is None else (region.tail * SECTOR, len(region.starts))
        )
        return max(0, self.geometry.region_bytes - taken - footer_bytes(records + 1))

    def _advance(self, index: int) -> None:
        """Free a region, or queue its footer, once no work on it is in progress."""
        region = self._regions[index]
        if (
            region.busy
            or region.unwritten
            or region.state not in {RegionState.FULL, RegionState.CLOSED}
        ):
            return
        if not region.live:
            self._evict(index)
            self._free.append(index)
        elif region.state is RegionState.FULL:
            self._footers_due.append(index)

    def _count(self, region: Region, number: int, sign: int) -> None:
        region.live += sign
        self.records += sign
        self.used_bytes += sign * region.sectors[number] * SECTOR

    def _first_of(self, index: int) -> int:
        """Return the place of a region's first sector."""
        return self._first_place + index * self.geometry.region_sectors

    def _life(self, index: int) -> RegionLife:
        return RegionLife(self._uuid, index, self._regions[index].generation)

    def _locate(self, place: Place, *, dead: bool = False) -> tuple[int, Region | None, int]:
        """Return region number, region (None if no record is there) and record number of a place.

        Finds dead records only with `dead`.
        """
        index, sector = divmod(place - self._first_place, self.geometry.region_sectors)
        if not 0 <= index < len(self._regions):
            return index, None, -1
        region = self._regions[index]
        number = region.find(sector)
        if number < 0 or not (dead or region.sectors[number]):
            return index, None, -1
        return index, region, number
