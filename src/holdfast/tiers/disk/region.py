"""The disk tier's bytes: superblock, region header, footer and snapshot; pure pack and parse.

    | superblock A | superblock B | snapshot A | snapshot B | region 0 | region 1 | ...

    region  | header 4 KiB | record | record | ...      ... | footer |
    footer                                      | zeros | entry 0 | ... | entry n-1 | trailer 64 |

Everything is little-endian and lies on 4 KiB boundaries; all of it carries the file's uuid and a
CRC-32. Byte by byte in docs/reference/format.md. A *generation* counts the lives of all regions of
a file: it never repeats, so a record, footer or row of an earlier life can not be taken for a
later one, and a greater generation is a younger region.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, Header, read_header, record_bytes
from holdfast.buffers import ALIGNMENT, align_up
from holdfast.errors import FormatError
from holdfast.limits import GIB, MIB

FORMAT = 1
SECTOR = ALIGNMENT
"""All offsets and lengths are multiples of this; one sector is also the unit of a place."""

SUPERBLOCKS = 2
REGION_BYTES = 64 * MIB
REGION_BYTES_MIN = 8 * SECTOR
REGION_BYTES_MAX = 4 * GIB
INCARNATION_SHIFT = 32
"""generation = incarnation << 32 | n-th region taken since the file was opened."""

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
"""Room in a snapshot for this many freed records per region, on average."""


class Geometry(NamedTuple):
    """Where the regions of one file lie: bytes, and a count."""

    region_bytes: int
    region_count: int
    snapshot_bytes: int

    @classmethod
    def of(cls, region_bytes: int, region_count: int) -> Geometry:
        """Return the geometry of a file with so many regions."""
        freed_bytes = FREED_PER_REGION * _FREED.size
        room = _SNAPSHOT.size + region_count * (_ROW.size + freed_bytes)
        return cls(region_bytes, region_count, align_up(room))

    @classmethod
    def within(cls, capacity_bytes: int, region_bytes: int) -> Geometry:
        """Return the most regions that fit into a file of `capacity_bytes`; may be none."""
        count = max(0, capacity_bytes // region_bytes)
        while count and cls.of(region_bytes, count).file_bytes > capacity_bytes:
            count -= 1
        return cls.of(region_bytes, count)

    @property
    def regions_at(self) -> int:
        """Offset of region 0."""
        return SUPERBLOCKS * SECTOR + 2 * self.snapshot_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.regions_at + self.region_count * self.region_bytes

    @property
    def region_sectors(self) -> int:
        """Sectors of one region."""
        return self.region_bytes // SECTOR

    @property
    def record_bytes_max(self) -> int:
        """The longest record a region can hold: all but its header and a footer of one entry."""
        return self.region_bytes - SECTOR - footer_bytes(1)

    def region_at(self, index: int) -> int:
        """Offset of a region."""
        return self.regions_at + index * self.region_bytes

    def snapshot_at(self, which: int) -> int:
        """Offset of snapshot A (0) or B (1)."""
        return SUPERBLOCKS * SECTOR + which * self.snapshot_bytes


class Superblock(NamedTuple):
    """What a file says of itself. `incarnation` counts how often it was opened."""

    uuid: bytes
    incarnation: int
    geometry: Geometry


class Entry(NamedTuple):
    """One record of a region: its header as stamped (128 bytes), first sector, sectors."""

    head: bytes
    sector: int
    sectors: int


class Listed(NamedTuple):
    """An entry that a footer or a scan found in a region, with its header read."""

    header: Header
    entry: Entry


class Life(NamedTuple):
    """One life of one region of one file; what every region header and footer is bound to."""

    uuid: bytes
    region: int
    generation: int


class Row(NamedTuple):
    """One region in a snapshot; `footer_bytes` is 0 if not sealed, `in_use` 0 if all was freed."""

    generation: int
    footer_bytes: int
    in_use: int


class Snapshot(NamedTuple):
    """The regions at one moment, and the records freed since their footers (region, sector)."""

    uuid: bytes
    sequence: int
    rows: Sequence[Row]
    freed: Sequence[tuple[int, int]]


def region_bytes_for(capacity_bytes: int) -> int:
    """Choose a region size: 64 MiB; an eighth of small capacities; at most 65,536 regions."""
    small = max(MIB, capacity_bytes // 8 // SECTOR * SECTOR)
    large = align_up(capacity_bytes // 65_536, MIB)
    return min(max(min(REGION_BYTES, small), large), REGION_BYTES_MAX)


def footer_bytes(records: int) -> int:
    """Return the bytes a footer of so many entries takes at the end of its region."""
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
    """Return a superblock; raise FormatError if it is foreign, unknown, damaged or impossible."""
    if len(block) < SECTOR:
        raise FormatError(f"it has {len(block)} bytes, no superblock")
    fields = _SUPERBLOCK.unpack_from(block)
    magic, version, crc, uuid, incarnation, region_bytes, count, snapshot_bytes = fields
    if magic != _SUPERBLOCK_MAGIC:
        raise FormatError(f"it starts with {magic!r}, not {_SUPERBLOCK_MAGIC!r}")
    if version != FORMAT:
        raise FormatError(f"it has format {version}, this build reads {FORMAT}")
    if zlib.crc32(block[16:SECTOR]) != crc:
        raise FormatError("its superblock fails the CRC")
    sane = REGION_BYTES_MIN <= region_bytes <= REGION_BYTES_MAX and not region_bytes % SECTOR
    geometry = Geometry.of(region_bytes, count)
    if not sane or not count or snapshot_bytes != geometry.snapshot_bytes:
        raise FormatError(f"its geometry makes no sense: {count} regions of {region_bytes} bytes")
    return Superblock(uuid, incarnation, geometry)


def pack_region_header(life: Life) -> bytes:
    """Return the 4 KiB in front of a region's records."""
    block = bytearray(SECTOR)
    _REGION.pack_into(block, 0, _REGION_MAGIC, 0, life.generation, life.uuid, life.region)
    block[4:8] = zlib.crc32(memoryview(block)[8:]).to_bytes(4, "little")
    return bytes(block)


def parse_region_header(block: bytes | memoryview, uuid: bytes, index: int) -> int:
    """Return the generation of region `index`; 0 if this is no intact header of it."""
    if len(block) < SECTOR:
        return 0
    magic, crc, generation, found_uuid, found_index = _REGION.unpack_from(block)
    if (magic, found_uuid, found_index) != (_REGION_MAGIC, uuid, index):
        return 0
    return int(generation) if zlib.crc32(block[8:SECTOR]) == crc else 0


def pack_footer(life: Life, entries: Sequence[Entry]) -> bytes:
    """Return the footer of a region: entries and trailer, padded in front to whole sectors."""
    listed = b"".join(_ENTRY.pack(*entry) for entry in entries)
    trailer = bytearray(TRAILER_BYTES)
    _TRAILER.pack_into(
        trailer, 0, _TRAILER_MAGIC, 0, life.generation, life.uuid, life.region, len(entries)
    )
    crc = zlib.crc32(memoryview(trailer)[8:], zlib.crc32(listed))
    trailer[4:8] = crc.to_bytes(4, "little")
    return (listed + trailer).rjust(footer_bytes(len(entries)), b"\0")


def footer_needs(tail: bytes | memoryview, life: Life) -> int:
    """Return how many bytes the footer has whose last ones are `tail`; 0 if there is none."""
    if len(tail) < TRAILER_BYTES:
        return 0
    trailer = tail[len(tail) - TRAILER_BYTES :]
    magic, _, generation, uuid, index, count = _TRAILER.unpack_from(trailer)
    if magic != _TRAILER_MAGIC or Life(uuid, index, generation) != life:
        return 0
    return footer_bytes(count)


def parse_footer(tail: bytes | memoryview, life: Life, region_sectors: int) -> list[Listed] | None:
    """Return the records of a footer that `tail` ends with; None if it is not whole and intact.

    Entries that name another life or lie outside of the region are left out.
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
    for entry in map(Entry._make, _ENTRY.iter_unpack(listed)):
        header = _header_of(entry, life.generation, last)
        if header:
            found.append(Listed(header, entry))
    return found


def _header_of(entry: Entry, generation: int, last: int) -> Header | None:
    """Read an entry's header; None unless it is of this life and within the records' sectors."""
    head, sector, sectors = entry
    try:
        header, found = read_header(head)
    except FormatError:
        return None
    whole = found == generation and record_bytes(header.payload_bytes) == sectors * SECTOR
    return header if whole and 1 <= sector <= last - sectors else None


def pack_snapshot(snapshot: Snapshot, snapshot_bytes: int) -> bytes:
    """Return a snapshot in whole sectors; freed records that don't fit are left out."""
    rows = b"".join(_ROW.pack(*row) for row in snapshot.rows)
    room = (snapshot_bytes - _SNAPSHOT.size - len(rows)) // _FREED.size
    freed = snapshot.freed[:room]
    blob = bytearray(_SNAPSHOT.size) + rows + b"".join(_FREED.pack(*pair) for pair in freed)
    _SNAPSHOT.pack_into(
        blob,
        0,
        _SNAPSHOT_MAGIC,
        0,
        snapshot.sequence,
        snapshot.uuid,
        len(snapshot.rows),
        len(freed),
    )
    blob[4:8] = zlib.crc32(memoryview(blob)[8:]).to_bytes(4, "little")
    return bytes(blob).ljust(align_up(len(blob)), b"\0")


def parse_snapshot(blob: bytes | memoryview, uuid: bytes, region_count: int) -> Snapshot | None:
    """Return the snapshot at the start of `blob`; None if it is not of this file and intact."""
    if len(blob) < _SNAPSHOT.size:
        return None
    magic, crc, sequence, found_uuid, regions, freed = _SNAPSHOT.unpack_from(blob)
    if (magic, found_uuid, regions) != (_SNAPSHOT_MAGIC, uuid, region_count):
        return None
    rows_end = _SNAPSHOT.size + regions * _ROW.size
    end = rows_end + freed * _FREED.size
    if end > len(blob) or zlib.crc32(blob[8:end]) != crc:
        return None
    rows = [Row(*fields) for fields in _ROW.iter_unpack(blob[_SNAPSHOT.size : rows_end])]
    pairs = [(region, sector) for region, sector in _FREED.iter_unpack(blob[rows_end:end])]
    return Snapshot(uuid, sequence, rows, pairs)
