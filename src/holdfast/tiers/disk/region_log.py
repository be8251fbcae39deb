"""Which record lies where in the regions of a disk tier: state only, no I/O and no lock.

    reserve ---> claim ---> finish          one record: reserved, being written, held or dead
    FREE -> OPEN -> FULL -> SEALED -> FREE  one region; UNSCANNED where a crash or restart left it

The caller holds the tier's lock around every call. A region is taken again only when no write,
footer or scan of it is under way. Per record this keeps 24 bytes (key, sector, sectors), because
it counts toward the store's budget per block; headers are kept until the footer has them.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from holdfast.blocks.key import KEY_BYTES
from holdfast.tiers.base import NOWHERE, Dropped, Place, Reserved, Survivor
from holdfast.tiers.disk.region import (
    FREED_PER_REGION,
    SECTOR,
    Entry,
    Geometry,
    Life,
    Listed,
    Row,
    footer_bytes,
)
from holdfast.tiers.disk.region_table import UNNAMED, Region, State


class Claim(NamedTuple):
    """A reserved record that a writer has taken on: its region's life, and where it lies."""

    life: Life
    offset: int
    nbytes: int


class Held(NamedTuple):
    """A record to read: the life that it must turn out to be of, its offset and length."""

    life: Life
    offset: int
    nbytes: int


class Seal(NamedTuple):
    """A region whose footer is due: its life and what the footer lists."""

    life: Life
    entries: list[Entry]


class RegionLog:
    """Places in regions, oldest region reclaimed first. Every number of bytes here is exact."""

    def __init__(self, geometry: Geometry, uuid: bytes, first_generation: int) -> None:
        self.geometry = geometry
        self.used_bytes = 0
        self.records = 0
        self._uuid = uuid
        self._next_generation = first_generation
        self._regions = [Region() for _ in range(geometry.region_count)]
        self._free = deque(range(geometry.region_count))
        self._taken: dict[int, None] = {}
        self._open: int | None = None
        self._to_seal: deque[int] = deque()

    # Writing: reserve, claim, finish.

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Append places to the open region; take the next where it is full."""
        dropped: list[Dropped] = []
        return Reserved([self._place(size, dropped) for size in sizes], dropped)

    def claim(self, place: Place) -> Claim | None:
        """Take on the writing of a reserved place; None if it is not reserved, or taken on."""
        index, region, number = self._at(place)
        if region is None:
            return None
        sector = region.starts[number]
        if sector not in region.unwritten or sector in region.claimed:
            return None
        region.claimed.add(sector)
        return Claim(self._life(index), self.offset(place), region.sectors[number] * SECTOR)

    def finish(self, place: Place, head: bytes) -> None:
        """End a claimed write: `head` is the header now on the medium, empty if that failed."""
        index, region, number = self._at(place, dead=True)
        if region is None:
            return
        sector = region.starts[number]
        region.unwritten.discard(sector)
        region.claimed.discard(sector)
        if not head:
            region.sectors[number] = 0
        if region.sectors[number]:
            key = head[32 : 32 + KEY_BYTES]
            region.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES] = key
            region.heads[number] = head
            self._count(region, number, 1)
        self._settle(index)

    def has_header(self, life: Life) -> bool:
        """Whether a region's header of this life is on the medium."""
        return self._regions[life.region].headed

    def begun(self, life: Life) -> None:
        """A region's header of this life is on the medium now."""
        self._regions[life.region].headed = True

    def abandon(self, life: Life) -> None:
        """Reserve nothing more in a region whose header could not be written."""
        if self._open == life.region:
            self._close_open()

    # Reading.

    def held(self, place: Place, key: bytes, room: int) -> Held | None:
        """Return where the record of `key` lies; None if it is not there or longer than `room`."""
        index, region, number = self._at(place)
        if region is None or not region.holds(number) or region.key(number) != key:
            return None
        nbytes = region.sectors[number] * SECTOR
        if nbytes > room:
            return None
        return Held(self._life(index), self.offset(place), nbytes)

    def is_current(self, life: Life) -> bool:
        """Whether a region is still in this life."""
        return self._regions[life.region].generation == life.generation

    def offset(self, place: Place) -> int:
        """Return a place's offset in the file."""
        return self.geometry.regions_at + place * SECTOR

    # Forgetting.

    def free(self, places: Iterable[Place]) -> None:
        """Mark records dead; a region without live records is free again."""
        for place in places:
            index, region, number = self._at(place)
            if region is None:
                continue
            sector = region.starts[number]
            if sector not in region.unwritten:
                self._count(region, number, -1)
                region.heads.pop(number, None)
            elif sector not in region.claimed:
                region.unwritten.discard(sector)
            region.sectors[number] = 0
            self._settle(index)

    # Sealing and snapshots.

    def next_seal(self) -> Seal | None:
        """Take a region whose footer is due; `sealed` must follow."""
        while self._to_seal:
            index = self._to_seal.popleft()
            region = self._regions[index]
            if region.state is not State.FULL or region.unwritten or region.busy:
                continue
            region.busy += 1
            entries = [
                Entry(region.heads[n], region.starts[n], region.sectors[n])
                for n in sorted(region.heads)
            ]
            return Seal(self._life(index), entries)
        return None

    def sealed(self, seal: Seal, written: int) -> None:
        """End sealing: the footer has `written` bytes, 0 if it could not be written.

        Without a footer the region serves on, and a restart scans it.
        """
        region = self._regions[seal.life.region]
        region.busy -= 1
        region.state = State.SEALED
        region.footer_bytes = written
        region.rest()
        self._settle(seal.life.region)

    def close_open(self) -> None:
        """Seal the open region as it is; what is still being written keeps its footer away."""
        if self._open is not None:
            self._close_open()

    def rows(self) -> list[Row]:
        """Return the regions as a snapshot lists them."""
        return [
            Row(r.generation, r.footer_bytes, int(r.state is not State.FREE)) for r in self._regions
        ]

    def freed(self) -> list[tuple[int, int]]:
        """Return the dead records of sealed regions, youngest region first.

        As many as a snapshot has room for, and without looking into regions that are all alive:
        nobody reads or writes meanwhile.
        """
        dead = (
            (index, region.starts[n])
            for index in reversed(self._taken)
            if (region := self._regions[index]).state is State.SEALED and region.dead
            for n in range(len(region.starts))
            if not region.sectors[n]
        )
        return list(itertools.islice(dead, FREED_PER_REGION * self.geometry.region_count))

    def dead(self) -> dict[Life, int]:
        """Return how many records of each sealed region that has a footer are dead."""
        return {
            self._life(index): region.dead
            for index in self._taken
            if (region := self._regions[index]).state is State.SEALED and region.footer_bytes
        }

    def begin_prune(self, life: Life) -> set[int] | None:
        """Return where a sealed region's live records begin, None of another; `end_prune` it."""
        region = self._regions[life.region]
        if region.state is not State.SEALED or region.generation != life.generation:
            return None
        region.busy += 1
        return region.alive()

    def end_prune(self, life: Life, alive: Collection[int], written: int) -> None:
        """Forget the dead: the footer lists those alive only, in `written` bytes; 0: as before."""
        region = self._regions[life.region]
        region.busy -= 1
        if written:
            region.footer_bytes = written
            region.keep(alive)
        self._settle(life.region)

    # Recovery.

    def adopt(self, generations: Sequence[int], empty: Collection[int] = ()) -> list[Life]:
        """Take over regions that have a life (generation > 0) unscanned; return them by age.

        Those that are `empty` are free, and known by the life that was freed.
        """
        lives = [Life(self._uuid, i, g) for i, g in enumerate(generations) if g and i not in empty]
        lives.sort(key=lambda life: life.generation)
        for index in empty:
            self._regions[index].generation = generations[index]
        for life in lives:
            region = self._regions[life.region]
            region.state, region.generation = State.UNSCANNED, life.generation
            self._taken[life.region] = None
        self._free = deque(i for i, g in enumerate(generations) if not g or i in empty)
        return lives

    def retire(self, index: int) -> None:
        """Never use a region whose header can not even be read."""
        self._free.remove(index)

    def begin_scan(self, life: Life) -> bool:
        """Keep an unscanned region from being reclaimed; False if it already was."""
        region = self._regions[life.region]
        if region.state is not State.UNSCANNED or region.generation != life.generation:
            return False
        region.busy += 1
        return True

    def load(
        self, life: Life, found: Sequence[Listed], freed: set[int], footer: int
    ) -> list[Survivor]:
        """Fill a region with what its footer or scan found; return what is alive, with places.

        `freed` are sectors of records freed before the restart; `footer` has 0 bytes if a footer
        is yet to be written.
        """
        region = self._regions[life.region]
        by_place = sorted(found, key=lambda listed: listed.entry.sector)
        entries = [entry for _, entry in by_place]
        first = life.region * self.geometry.region_sectors
        alive = [
            Survivor(header, Place(first + entry.sector))
            for header, entry in by_place
            if entry.sector not in freed
        ]
        region.keys = bytearray().join(
            UNNAMED if entry.sector in freed else header.key for header, entry in by_place
        )
        region.starts = array("I", [entry.sector for entry in entries])
        lengths = [0 if entry.sector in freed else entry.sectors for entry in entries]
        region.sectors = array("I", lengths)
        region.live = len(alive)
        self.records += len(alive)
        self.used_bytes += sum(lengths) * SECTOR
        if not footer:
            region.heads = {n: entry.head for n, entry in enumerate(entries) if lengths[n]}
        region.footer_bytes = footer
        region.state = State.SEALED if footer else State.FULL
        return alive

    def end_scan(self, life: Life) -> None:
        """Let a scanned region be reclaimed again."""
        self._regions[life.region].busy -= 1
        self._settle(life.region)

    # Inside.

    def _place(self, size: int, dropped: list[Dropped]) -> Place:
        if size <= 0 or size % SECTOR or size > self.geometry.record_bytes_max:
            return NOWHERE
        if self._open is not None and not self._fits(self._regions[self._open], size):
            self._close_open()
        if self._open is None and not self._take(dropped):
            return NOWHERE
        index = self._open
        assert index is not None  # noqa: S101 - _take has just opened one
        region = self._regions[index]
        place = Place(index * self.geometry.region_sectors + region.tail)
        region.keys += UNNAMED
        region.starts.append(region.tail)
        region.sectors.append(size // SECTOR)
        region.unwritten.add(region.tail)
        region.tail += size // SECTOR
        return place

    def _fits(self, region: Region, size: int) -> bool:
        footer = footer_bytes(len(region.starts) + 1)
        return region.tail * SECTOR + size + footer <= self.geometry.region_bytes

    def _take(self, dropped: list[Dropped]) -> bool:
        """Open a free region, else the oldest that nothing is under way in; False if none."""
        if self._free:
            index = self._free.popleft()
        else:
            oldest = next((i for i in self._taken if self._idle(self._regions[i])), None)
            if oldest is None:
                return False
            index = oldest
            dropped += self._drop(index)
        region = self._regions[index]
        region.begin(self._next_generation)
        self._next_generation += 1
        self._taken[index] = None
        self._open = index
        return True

    @staticmethod
    def _idle(region: Region) -> bool:
        return not (region.busy or region.unwritten or region.state is State.OPEN)

    def _drop(self, index: int) -> list[Dropped]:
        """Empty a region; return what it held."""
        region = self._regions[index]
        base = index * self.geometry.region_sectors
        lost = []
        for number in range(len(region.starts)):
            if region.holds(number):
                lost.append(Dropped(region.key(number), Place(base + region.starts[number])))
                self._count(region, number, -1)
        del self._taken[index]
        region.state = State.FREE
        return lost

    def _close_open(self) -> None:
        index, self._open = self._open, None
        if index is not None:
            self._regions[index].state = State.FULL
            self._settle(index)

    def _settle(self, index: int) -> None:
        """Move a region on when the last thing under way in it has ended."""
        region = self._regions[index]
        if region.busy or region.unwritten or region.state not in {State.FULL, State.SEALED}:
            return
        if not region.live:
            self._drop(index)
            self._free.append(index)
        elif region.state is State.FULL:
            self._to_seal.append(index)

    def _count(self, region: Region, number: int, sign: int) -> None:
        region.live += sign
        self.records += sign
        self.used_bytes += sign * region.sectors[number] * SECTOR

    def _life(self, index: int) -> Life:
        return Life(self._uuid, index, self._regions[index].generation)

    def _at(self, place: Place, *, dead: bool = False) -> tuple[int, Region | None, int]:
        """Return region number, region and record number of a place; None where nothing lies."""
        index, sector = divmod(place, self.geometry.region_sectors)
        if not 0 <= index < len(self._regions):
            return index, None, -1
        region = self._regions[index]
        number = region.find(sector)
        if number < 0 or not (dead or region.sectors[number]):
            return index, None, -1
        return index, region, number
