"""What an earlier process left in the regions: snapshot, region headers, footers, scans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, MAGIC, Header, read_header, record_bytes
from holdfast.buffers import aligned_buffer
from holdfast.codec import pack
from holdfast.errors import FormatError
from holdfast.limits import KIB, MIB
from holdfast.tiers.disk.extent_io import Extents
from holdfast.tiers.disk.region import (
    SECTOR,
    SUPERBLOCKS,
    Entry,
    Geometry,
    Life,
    Listed,
    Snapshot,
    Superblock,
    footer_needs,
    parse_footer,
    parse_region_header,
    parse_snapshot,
    parse_superblock,
)
from holdfast.tiers.gate import Gate

_TAIL_BYTES = 16 * KIB
"""Read at a region's end where no snapshot tells how long its footer is: 119 records."""

_SCAN_BYTES = 4 * MIB

_BAD_SECTORS_MAX = 256
"""Of one region: a device that answers nothing may take long to say so each time."""

_AHEAD = 8
"""Footers read at once."""

_UNREADABLE = -1


class Found(NamedTuple):
    """What the regions' headers and the newest snapshot say, before any region is scanned.

    `generations` by region, 0 where it never had a life; `unreadable` regions; `empty`, `footers`
    and `freed` from the snapshot, for regions still in the life it saw; its `sequence`, 0 if there
    is none. A region that is `empty` keeps its generation: a later snapshot has to say of just that
    life that all of it was freed.
    """

    generations: list[int]
    unreadable: list[int]
    empty: set[int]
    footers: dict[int, int]
    freed: dict[int, set[int]]
    sequence: int


class Recovered(NamedTuple):
    """One region's records; `footer_bytes` is 0 if it had to be scanned.

    `error` if some of it can not be read: records may be missing, perhaps all.
    """

    life: Life
    records: list[Listed]
    footer_bytes: int
    error: OSError | None


def read_superblock(extents: Extents) -> Superblock:
    """Return the superblock of the latest incarnation; raise FormatError if there is none."""
    found: list[Superblock] = []
    reasons: list[FormatError] = []
    for which in range(SUPERBLOCKS):
        block = aligned_buffer(SECTOR)
        try:
            extents.read(which * SECTOR, [block])
            found.append(parse_superblock(block))
        except FormatError as error:
            reasons.append(error)
        except OSError as error:
            reasons.append(FormatError(f"its superblock can not be read: {error}"))
    if not found:
        raise reasons[0]
    return max(found, key=lambda superblock: superblock.incarnation)


def _read_snapshot(extents: Extents, superblock: Superblock) -> Snapshot | None:
    geometry = superblock.geometry
    found = []
    for which in range(2):
        blob = aligned_buffer(geometry.snapshot_bytes)
        try:
            extents.read(geometry.snapshot_at(which), [blob])
        except OSError:
            continue
        snapshot = parse_snapshot(blob, superblock.uuid, geometry.region_count)
        if snapshot:
            found.append(snapshot)
    return max(found, key=lambda snapshot: snapshot.sequence, default=None)


def look(extents: Extents, superblock: Superblock, pool: ThreadPoolExecutor) -> Found:
    """Read all region headers and the snapshot: enough to serve new writes safely."""
    generations = _all_generations(extents, superblock, pool)
    unreadable = [i for i, g in enumerate(generations) if g == _UNREADABLE]
    generations = [max(g, 0) for g in generations]
    found = Found(generations, unreadable, set(), {}, {}, 0)
    snapshot = _read_snapshot(extents, superblock)
    if snapshot is None:
        return found
    for index, row in enumerate(snapshot.rows):
        if row.generation != generations[index]:
            continue
        if row.in_use:
            found.footers[index] = row.footer_bytes
        else:
            found.empty.add(index)
    for index, sector in snapshot.freed:
        if index in found.footers:
            found.freed.setdefault(index, set()).add(sector)
    return found._replace(sequence=snapshot.sequence)


def _all_generations(
    extents: Extents, superblock: Superblock, pool: ThreadPoolExecutor
) -> list[int]:
    count = superblock.geometry.region_count
    step = max(1, count // 16)
    parts = pool.map(
        lambda start: _generations(extents, superblock, range(start, min(start + step, count))),
        range(0, count, step),
    )
    return [generation for part in parts for generation in part]


def recover_regions(
    extents: Extents, geometry: Geometry, lives: Sequence[Life], footers: Mapping[int, int],
    pool: ThreadPoolExecutor, gate: Gate,
) -> Iterator[Recovered]:  # fmt: skip
    """Yield what each region has, in order, until the gate shuts.

    `footers` are the lengths that are known, by region. Footers are read ahead in threads; parsing
    them there would only make the threads wait for one another.
    """
    for start in range(0, len(lives), _AHEAD):
        if not gate.enter():
            return
        try:
            ahead = lives[start : start + _AHEAD]
            reads = [
                pool.submit(read_footer, extents, geometry, life, footers.get(life.region, 0))
                for life in ahead
            ]
            wait(reads)
        finally:
            gate.leave()
        for life, read in zip(ahead, reads, strict=True):
            if not gate.enter():
                return
            try:
                recovered = _recover_region(extents, geometry, life, read)
            finally:
                gate.leave()
            yield recovered


def _recover_region(
    extents: Extents, geometry: Geometry, life: Life, read: Future[memoryview | None]
) -> Recovered:
    error: OSError | None = None
    try:
        footer = read.result()
    except OSError as failed:
        footer, error = None, failed
    if footer:
        records = parse_footer(footer, life, geometry.region_sectors)
        if records is not None:
            return Recovered(life, records, len(footer), None)
    image, failed_too = _read_image(extents, geometry, life)
    return Recovered(life, list(_scan(image, life)), 0, error or failed_too)


def read_footer(
    extents: Extents, geometry: Geometry, life: Life, hint: int = 0
) -> memoryview | None:
    """Return the footer of a region, `hint` bytes long if that is not 0; None if there is none.

    Raises OSError.
    """
    end = geometry.region_at(life.region) + geometry.region_bytes
    size = min(hint or _TAIL_BYTES, geometry.region_bytes - SECTOR)
    tail = aligned_buffer(size)
    extents.read(end - size, [tail])
    need = footer_needs(tail, life)
    if not need or need > geometry.region_bytes - SECTOR:
        return None
    if need > size:
        tail = aligned_buffer(need)
        extents.read(end - need, [tail])
    return tail[len(tail) - need :]


def _read_image(
    extents: Extents, geometry: Geometry, life: Life
) -> tuple[memoryview, OSError | None]:
    """Return a region's bytes, zeros where it can not be read, and the first error there was.

    Its header is left out: it has been read. After too many bad sectors nothing more is asked for.
    """
    image = aligned_buffer(geometry.region_bytes)
    start, bad, error = geometry.region_at(life.region), 0, None
    for at in range(SECTOR, len(image), _SCAN_BYTES):
        piece = image[at : at + _SCAN_BYTES]
        try:
            extents.read(start + at, [piece])
            continue
        except OSError as failed:
            error = error or failed
        for near in range(0, len(piece), SECTOR):
            sector = piece[near : near + SECTOR]
            try:
                extents.read(start + at + near, [sector])
            except OSError:
                sector[:] = bytes(SECTOR)
                bad += 1
                if bad == _BAD_SECTORS_MAX:
                    piece[near:] = bytes(len(piece) - near)
                    return image, error
    return image, error


def _scan(image: memoryview, life: Life) -> Iterator[Listed]:
    """Yield the records of a region without footer, sector by sector where there are gaps.

    A footer's entries are hints, since whoever reads a record verifies it. These are verified
    here, unless they are sealed: the record behind a good header may be torn.
    """
    at = SECTOR
    while at < len(image):
        header = _record_at(image[at:], life.generation)
        if header is None:
            at += SECTOR
            continue
        nbytes = record_bytes(header.payload_bytes)
        head = bytes(image[at : at + HEADER_BYTES])
        yield Listed(header, Entry(head, at // SECTOR, nbytes // SECTOR))
        at += nbytes


def _generations(extents: Extents, superblock: Superblock, indexes: Sequence[int]) -> list[int]:
    block = aligned_buffer(SECTOR)
    generations = []
    for index in indexes:
        try:
            extents.read(superblock.geometry.region_at(index), [block])
        except OSError:
            generations.append(_UNREADABLE)
        else:
            generations.append(parse_region_header(block, superblock.uuid, index))
    return generations


def _record_at(image: memoryview, generation: int) -> Header | None:
    """Return the header of the whole record of this life that `image` starts with, if it does."""
    if image[: len(MAGIC)] != MAGIC:
        return None
    try:
        header, found = read_header(image)
    except FormatError:
        return None
    nbytes = record_bytes(header.payload_bytes)
    if found != generation or nbytes > len(image):
        return None
    return header if pack.intact(image[:nbytes], header) else None
