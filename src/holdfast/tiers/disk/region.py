"""The disk tier's format: pure functions for superblock, region header, footer and snapshot.

    | superblock A | superblock B | snapshot A | snapshot B | region 0 | region 1 | ...

    region  | header 4 KiB | record | record | ...      ... | footer |
    footer                                      | zeros | entry 0 | ... | entry n-1 | trailer 64 |

Everything is little-endian, starts on a 4 KiB boundary, and contains the file's uuid and a CRC-32.
docs/reference/format.md describes every byte. A *life* of a region is the time from its opening to
its reclaim. A *generation* numbers the lives of all regions of a file. It never repeats, so a
record, footer or row of an earlier life is not mistaken for one of a later life, and a greater
generation means a younger region.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, Header, read_header
from holdfast.buffers import ALIGNMENT, align_up
from holdfast.errors import FormatError
from holdfast.limits import GIB, MIB

FORMAT = 1
SECTOR = ALIGNMENT
"""Unit of all offsets, lengths and places, in bytes."""

SUPERBLOCKS = 2
REGION_BYTES = 64 * MIB
REGION_BYTES_MIN = 8 * SECTOR
REGION_BYTES_MAX = 4 * GIB
REGIONS_MAX = 1 << 20
"""Most regions of a new file: each takes memory, and a read of its header at every start."""

INCARNATION_SHIFT = 32
"""generation = incarnation << 32 | number of regions opened since the file was opened."""

_SUPERBLOCK = struct.Struct("<8sII16sQQQQ")
_SUPERBLOCK_MAGIC = b"HOLDFAST"
_REGION = struct.Struct("<4sIQ16sI")
_REGION_MAGIC = b"HFR1"
_TRAILER = struct.Struct("<4sIQ16sII24x")
_TRAILER_MAGIC = b"HFF1"
_ENTRY = struct.Struct(f"<{HEADER_BYTES}sII")
_SNAPSHOT = struct.Struct("<4sIQ16sII24x")
_SNAPSHOT_MAGIC = b"HFS1"
_ROW = struct.Struct("<QII")
_FREED = struct.Struct("<II")

TRAILER_BYTES = _TRAILER.size
ENTRY_BYTES = _ENTRY.size
FREED_PER_REGION = 8
"""Freed records per region that a snapshot has room for, on average."""


class RegionGeometry(NamedTuple):
    """Sizes in bytes and number of the regions of a file."""

    region_bytes: int
    region_count: int
    snapshot_bytes: int

    @classmethod
    def of(cls, region_bytes: int, region_count: int) -> RegionGeometry:
        """Return the geometry of a file with `region_count` regions."""
        freed_bytes = FREED_PER_REGION * _FREED.size
        snapshot_bytes = _SNAPSHOT.size + region_count * (_ROW.size + freed_bytes)
        return cls(region_bytes, region_count, align_up(snapshot_bytes))

    @classmethod
    def within(cls, capacity_bytes: int, region_bytes: int) -> RegionGeometry:
        """Return the geometry with the most regions that fit into `capacity_bytes`, possibly 0."""
        count = max(0, capacity_bytes // region_bytes)
        while count and cls.of(region_bytes, count).file_bytes > capacity_bytes:
            count -= 1
        return cls.of(region_bytes, count)

    @property
    def regions_at(self) -> int:
        """Offset of region 0 in bytes."""
        return SUPERBLOCKS * SECTOR + 2 * self.snapshot_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.regions_at + self.region_count * self.region_bytes

    @property
    def region_sectors(self) -> int:
        """Size of a region in sectors."""
        return self.region_bytes // SECTOR

    @property
    def stored_bytes_max(self) -> int:
        """Longest record in bytes: a region without its header and a footer of one entry."""
        return self.region_bytes - SECTOR - footer_bytes(1)

    def region_at(self, index: int) -> int:
        """Return the offset of a region in bytes."""
        return self.regions_at + index * self.region_bytes

    def snapshot_at(self, which: int) -> int:
        """Return the offset in bytes of snapshot A (0) or B (1)."""
        return SUPERBLOCKS * SECTOR + which * self.snapshot_bytes


class Superblock(NamedTuple):
    """Identity and geometry of a file. `incarnation` is how often the file was opened."""

    uuid: bytes
    incarnation: int
    geometry: RegionGeometry


class RegionEntry(NamedTuple):
    """One record of a region: its 128 header bytes as written, first sector, number of sectors."""

    head: bytes
    sector: int
    sectors: int


class ListedEntry(NamedTuple):
    """An entry that a footer or a scan found in a region, with its parsed header."""

    header: Header
    entry: RegionEntry


class RegionLife(NamedTuple):
    """One life of one region of one file; region headers and footers name their life."""

    uuid: bytes
    region: int
    generation: int


class RegionRow(NamedTuple):
    """One region in a snapshot; `footer_bytes` is 0 without footer, `in_use` 0 if it is free."""

    generation: int
    footer_bytes: int
    in_use: int


class RegionSnapshot(NamedTuple):
    """State of all regions, and the records (region, sector) freed since their footers."""

    uuid: bytes
    sequence: int
    rows: Sequence[RegionRow]
    freed: Sequence[tuple[int, int]]


def region_bytes_for(capacity_bytes: int) -> int:
    """Return the default region size in bytes.

    It is 64 MiB, an eighth of a small capacity, or larger if there were more than 65,536 regions.
    """
    small = max(MIB, capacity_bytes // 8 // SECTOR * SECTOR)
    large = align_up(capacity_bytes // 65_536, MIB)
    return min(max(min(REGION_BYTES, small), large), REGION_BYTES_MAX)


def footer_bytes(records: int) -> int:
    """Return the size in bytes of a footer with an entry for each of `records`."""
    return align_up(records * ENTRY_BYTES + TRAILER_BYTES)


def pack_superblock(superblock: Superblock) -> bytes:
    """Return the 4 KiB of one superblock."""
    uuid, incarnation, geometry = superblock
    block = bytearray(SECTOR)
    _SUPERBLOCK.pack_into(
        block, 0, _SUPERBLOCK_MAGIC, FORMAT, 0, uuid, incarnation,
        geometry.region_bytes, geometry.region_count, geometry.snapshot_bytes,
    )  # fmt: skip
    block[12:16] = zlib.crc32(memoryview(block)[16:]).to_bytes(4, "little")
    return bytes(block)


def parse_superblock(block: bytes | memoryview) -> Superblock:
    """Return a superblock; raise FormatError if it is foreign, unsupported, damaged or invalid."""
    if len(block) < SECTOR:
        raise FormatError(f"it has {len(block)} bytes, a superblock has {SECTOR}")
    fields = _SUPERBLOCK.unpack_from(block)
    magic, version, crc, uuid, incarnation, region_bytes, count, snapshot_bytes = fields
    if magic != _SUPERBLOCK_MAGIC:
        raise FormatError(f"it starts with {magic!r}, not {_SUPERBLOCK_MAGIC!r}")
    if version != FORMAT:
        raise FormatError(f"it has format {version}, this build reads {FORMAT}")
    if zlib.crc32(block[16:SECTOR]) != crc:
        raise FormatError("its superblock fails the CRC")
    valid = REGION_BYTES_MIN <= region_bytes <= REGION_BYTES_MAX and not region_bytes % SECTOR
    geometry = RegionGeometry.of(region_bytes, count)
    if not valid or not count or snapshot_bytes != geometry.snapshot_bytes:
        raise FormatError(f"its geometry is invalid: {count} regions of {region_bytes} bytes")
    return Superblock(uuid, incarnation, geometry)


def pack_region_header(life: RegionLife) -> bytes:
    """Return the 4 KiB header of a region."""
    block = bytearray(SECTOR)
    _REGION.pack_into(block, 0, _REGION_MAGIC, 0, life.generation, life.uuid, life.region)
    block[4:8] = zlib.crc32(memoryview(block)[8:]).to_bytes(4, "little")
    return bytes(block)


def parse_region_header(block: bytes | memoryview, uuid: bytes, index: int) -> int:
    """Return the generation of region `index`; 0 if the block is not its intact header."""
    if len(block) < SECTOR:
        return 0
    magic, crc, generation, found_uuid, found_index = _REGION.unpack_from(block)
    if (magic, found_uuid, found_index) != (_REGION_MAGIC, uuid, index):
        return 0
    return int(generation) if zlib.crc32(block[8:SECTOR]) == crc else 0


def pack_footer(life: RegionLife, entries: Sequence[RegionEntry]) -> bytes:
    """Return the footer of a region: zeros up to whole sectors, entries, trailer."""
    listed = b"".join(_ENTRY.pack(*entry) for entry in entries)
    trailer = bytearray(TRAILER_BYTES)
    _TRAILER.pack_into(
        trailer, 0, _TRAILER_MAGIC, 0, life.generation, life.uuid, life.region, len(entries)
    )
    crc = zlib.crc32(memoryview(trailer)[8:], zlib.crc32(listed))
    trailer[4:8] = crc.to_bytes(4, "little")
    return (listed + trailer).rjust(footer_bytes(len(entries)), b"\0")


def footer_needs(tail: bytes | memoryview, life: RegionLife) -> int:
    """Return the size in bytes of the footer that ends with `tail`; 0 if `tail` ends no footer."""
    if len(tail) < TRAILER_BYTES:
        return 0
    trailer = tail[len(tail) - TRAILER_BYTES :]
    magic, _, generation, uuid, index, count = _TRAILER.unpack_from(trailer)
    if magic != _TRAILER_MAGIC or RegionLife(uuid, index, generation) != life:
        return 0
    return footer_bytes(count)


def parse_footer(
    tail: bytes | memoryview, life: RegionLife, region_sectors: int
) -> list[ListedEntry] | None:
    """Return the entries of the footer at the end of `tail`; None if it is incomplete or damaged.

    Entries of another life or outside the region are omitted.
    """
    need = footer_needs(tail, life)
    if not need or need > len(tail):
        return None
    tail = memoryview(tail)
    _, crc, _, _, _, count = _TRAILER.unpack_from(tail, len(tail) - TRAILER_BYTES)
    start = len(tail) - TRAILER_BYTES - count * ENTRY_BYTES
    listed = tail[start : len(tail) - TRAILER_BYTES]
    if zlib.crc32(tail[len(tail) - TRAILER_BYTES + 8 :], zlib.crc32(listed)) != crc:
        return None
    last = region_sectors - need // SECTOR
    found = []
    for entry in map(RegionEntry._make, _ENTRY.iter_unpack(listed)):
        header = _header_of(entry, life.generation, last)
        if header:
            found.append(ListedEntry(header, entry))
    return found


def _header_of(entry: RegionEntry, generation: int, last: int) -> Header | None:
    """Return an entry's parsed header; None if it is of another life or overlaps the footer."""
    head, sector, sectors = entry
    try:
        header, found = read_header(head)
    except FormatError:
        return None
    matches = found == generation and header.stored_bytes == sectors * SECTOR
    return header if matches and 1 <= sector <= last - sectors else None


def pack_snapshot(snapshot: RegionSnapshot, snapshot_bytes: int) -> bytes:
    """Return a snapshot in whole sectors; freed records that do not fit are omitted."""
    uuid, sequence, rows, freed = snapshot
    blob = bytearray(_SNAPSHOT.size) + b"".join(_ROW.pack(*row) for row in rows)
    freed = freed[: (snapshot_bytes - len(blob)) // _FREED.size]
    blob += b"".join(_FREED.pack(*pair) for pair in freed)
    _SNAPSHOT.pack_into(blob, 0, _SNAPSHOT_MAGIC, 0, sequence, uuid, len(rows), len(freed))
    blob[4:8] = zlib.crc32(memoryview(blob)[8:]).to_bytes(4, "little")
    return bytes(blob).ljust(align_up(len(blob)), b"\0")


def parse_snapshot(
    blob: bytes | memoryview, uuid: bytes, region_count: int
) -> RegionSnapshot | None:
    """Return the snapshot at the start of `blob`; None if it is foreign or damaged."""
    if len(blob) < _SNAPSHOT.size:
        return None
    magic, crc, sequence, found_uuid, regions, freed = _SNAPSHOT.unpack_from(blob)
    if (magic, found_uuid, regions) != (_SNAPSHOT_MAGIC, uuid, region_count):
        return None
    rows_end = _SNAPSHOT.size + regions * _ROW.size
    end = rows_end + freed * _FREED.size
    if end > len(blob) or zlib.crc32(blob[8:end]) != crc:
        return None
    rows = [RegionRow(*fields) for fields in _ROW.iter_unpack(blob[_SNAPSHOT.size : rows_end])]
    pairs = [(region, sector) for region, sector in _FREED.iter_unpack(blob[rows_end:end])]
    return RegionSnapshot(uuid, sequence, rows, pairs)
