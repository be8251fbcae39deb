"""Recover the records of an earlier process: snapshot, region headers, footers, scans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from holdfast.blocks.envelope import (
    HEADER_BYTES,
    MAGIC,
    SEAL_NONE,
    Header,
    read_header,
)
from holdfast.buffers import aligned_buffer
from holdfast.codec import pack
from holdfast.errors import FormatError
from holdfast.limits import KIB, MIB
from holdfast.tiers.disk.extent_io import Extents
from holdfast.tiers.disk.region import (
    SECTOR,
    SUPERBLOCKS,
    ListedEntry,
    RegionEntry,
    RegionGeometry,
    RegionLife,
    RegionSnapshot,
    Superblock,
    footer_needs,
    parse_footer,
    parse_region_header,
    parse_snapshot,
    parse_superblock,
)
from holdfast.tiers.gate import MediumGate

_TAIL_BYTES = 16 * KIB
"""Bytes read at a region's end if the footer's length is unknown: a footer of 119 records."""

_SCAN_BYTES = 4 * MIB

_BAD_SECTORS_MAX = 256
"""Unreadable sectors of a region at which its scan ends: each may cost a long device timeout."""

_FOOTERS_AT_ONCE = 8
"""Footers read in parallel."""

_UNREADABLE = -1
"""Stands for the generation of a region whose header cannot be read."""


class DiskState(NamedTuple):
    """State of all regions by their headers and the newest snapshot, before any region is scanned.

    `generations` is by region, 0 if the region was never used. `unreadable` lists regions with an
    unreadable header. `empty`, `footers` (footer bytes by region) and `freed` (sectors by region)
    come from the snapshot, for regions that are still in the life it lists. `sequence` is the
    snapshot's, 0 without one. An `empty` region keeps its generation, because a later snapshot
    must say of this life that all of its records were freed.
    """

    generations: list[int]
    unreadable: list[int]
    empty: set[int]
    footers: dict[int, int]
    freed: dict[int, set[int]]
    sequence: int


class RecoveredRegion(NamedTuple):
    """The records of one region; `footer_bytes` is 0 if the region was scanned.

    `error` is the first I/O error, None without one; with an error, records may be missing.
    """

    life: RegionLife
    records: list[ListedEntry]
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
            reasons.append(FormatError(f"its superblock cannot be read: {error}"))
    if not found:
        raise reasons[0]
    return max(found, key=lambda superblock: superblock.incarnation)


def read_state(extents: Extents, superblock: Superblock, pool: ThreadPoolExecutor) -> DiskState:
    """Read all region headers and the snapshot, which is enough to accept new writes."""
    geometry = superblock.geometry
    count = geometry.region_count
    step = max(1, count // 16)
    parts = pool.map(
        lambda start: _generations(extents, superblock, range(start, min(start + step, count))),
        range(0, count, step),
    )
    generations = [generation for part in parts for generation in part]
    unreadable = [i for i, g in enumerate(generations) if g == _UNREADABLE]
    generations = [max(g, 0) for g in generations]
    found = DiskState(generations, unreadable, set(), {}, {}, 0)
    snapshots: list[RegionSnapshot | None] = []
    for which in range(2):
        blob = aligned_buffer(geometry.snapshot_bytes)
        try:
            extents.read(geometry.snapshot_at(which), [blob])
        except OSError:
            continue
        snapshots.append(parse_snapshot(blob, superblock.uuid, count))
    snapshot = max(filter(None, snapshots), key=lambda each: each.sequence, default=None)
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


def recover_regions(
    extents: Extents, geometry: RegionGeometry, lives: Sequence[RegionLife],
    footers: Mapping[int, int], pool: ThreadPoolExecutor, gate: MediumGate,
) -> Iterator[RecoveredRegion]:  # fmt: skip
    """Yield the records of each region, in the order of `lives`, until the gate is shut.

    `footers` are the known footer lengths in bytes, by region. Threads of the pool read footers
    ahead. They do not parse them, because parsing holds the GIL.
    """
    for start in range(0, len(lives), _FOOTERS_AT_ONCE):
        ahead = lives[start : start + _FOOTERS_AT_ONCE]
        with gate.enter() as admitted:
            if not admitted:
                return
            reads = [
                pool.submit(read_footer, extents, geometry, life, footers.get(life.region, 0))
                for life in ahead
            ]
            wait(reads)
        for life, read in zip(ahead, reads, strict=True):
            with gate.enter() as admitted:
                if not admitted:
                    return
                recovered = _recover_region(extents, geometry, life, read)
            yield recovered


def _recover_region(
    extents: Extents, geometry: RegionGeometry, life: RegionLife, read: Future[memoryview | None]
) -> RecoveredRegion:
    error: OSError | None = None
    try:
        footer = read.result()
    except OSError as failed:
        footer, error = None, failed
    if footer:
        records = parse_footer(footer, life, geometry.region_sectors)
        if records is not None:
            return RecoveredRegion(life, records, len(footer), None)
    image, image_error = _read_image(extents, geometry, life)
    return RecoveredRegion(life, list(_scan(image, life)), 0, error or image_error)


def read_footer(
    extents: Extents, geometry: RegionGeometry, life: RegionLife, hint: int = 0
) -> memoryview | None:
    """Return the footer of a region; None if there is none. Raises OSError.

    `hint` is its expected length in bytes, 0 if unknown.
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
    extents: Extents, geometry: RegionGeometry, life: RegionLife
) -> tuple[memoryview, OSError | None]:
    """Return a region's bytes, with zeros for unreadable sectors, and the first error if any.

    The header is not read again. Reading stops after `_BAD_SECTORS_MAX` unreadable sectors.
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
        for inner in range(0, len(piece), SECTOR):
            sector = piece[inner : inner + SECTOR]
            try:
                extents.read(start + at + inner, [sector])
            except OSError:
                sector[:] = bytes(SECTOR)
                bad += 1
                if bad == _BAD_SECTORS_MAX:
                    piece[inner:] = bytes(len(piece) - inner)
                    return image, error
    return image, error


def _scan(image: memoryview, life: RegionLife) -> Iterator[ListedEntry]:
    """Yield the records of a region without a footer; search gaps sector by sector.

    Records are verified here unless they are sealed, because a crash may leave a torn record with
    an intact header. Entries of a footer need no such check: every read is verified later.
    """
    at = SECTOR
    while at < len(image):
        header = _record_at(image[at:], life.generation)
        if header is None:
            at += SECTOR
            continue
        nbytes = header.stored_bytes
        head = bytes(image[at : at + HEADER_BYTES])
        yield ListedEntry(header, RegionEntry(head, at // SECTOR, nbytes // SECTOR))
        at += nbytes


def _generations(extents: Extents, superblock: Superblock, indexes: Sequence[int]) -> list[int]:
    block = aligned_buffer(SECTOR)
    generations = [_UNREADABLE] * len(indexes)
    for at, index in enumerate(indexes):
        with contextlib.suppress(OSError):
            extents.read(superblock.geometry.region_at(index), [block])
            generations[at] = parse_region_header(block, superblock.uuid, index)
    return generations


def _record_at(image: memoryview, generation: int) -> Header | None:
    """Return the header of the record at the start of `image`; None if it is not of this life."""
    if image[: len(MAGIC)] != MAGIC:
        return None
    try:
        header, found = read_header(image)
    except FormatError:
        return None
    nbytes = header.stored_bytes
    if found != generation or nbytes > len(image):
        return None
    if header.seal == SEAL_NONE and not pack.matches(image[:nbytes], header):
        return None
    return header
