"""Names and bytes of segment objects and index objects; pure.

A segment object holds records of one namespace:

    | magic 4, format 2, zeros 2, blocks 4, CRC-32 4, namespace 16 | entries | zeros | records |

An entry is a key (16 bytes), and the offset and the length of its record (4 bytes each, in units of
4 KiB). The head is padded to 4 KiB, and the records follow as they are: sealed ones stay sealed.
An *index object* lists segments that its writer has published, retired or replaced. Readers learn
from it where a block is, so they ask the medium about no block. All integers are little-endian.
Exact bytes: docs/reference/format.md.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.blocks.key import KEY_BYTES
from holdfast.buffers import ALIGNMENT, align_up
from holdfast.errors import FormatError
from holdfast.limits import MIB
from holdfast.prepared import prepared

FORMAT = 1

SEGMENT_BYTES = 64 * MIB
"""Bytes of records for which a segment object is best."""

SEGMENT_BYTES_MAX = 72 * MIB
"""Most bytes of a segment object of several records: the last one may exceed `SEGMENT_BYTES`."""

SEGMENT_BYTES_MIN = 8 * MIB
"""A smaller object costs more than it saves: the packer waits a moment for more records."""

SEGMENT_BLOCKS_MAX = 1 << 14
"""Most records of a segment object."""

INDEX_BYTES_MAX = 64 * MIB
"""Longest index object that is read."""

AGE_CLASSES = {"1d": 86_400.0, "7d": 7 * 86_400.0, "30d": 30 * 86_400.0}
"""The prefixes of segment objects, and the seconds for which their objects are kept."""

INDEX = "index"
"""The prefix of index objects."""

_HEAD = struct.Struct("<4sHHII16s")
_ENTRY = struct.Struct("<16sII")
_MAGIC = b"HFSO"
_INDEX_HEAD = struct.Struct("<4sHHI")
_INDEX_MAGIC = b"HFSI"
_CRC_AT = 12
_SEGMENT_NAME = re.compile(r"(1d|7d|30d)/([0-9a-f]{2})/([0-9a-f]{16})-([0-9a-f]{16})")
_INDEX_NAME = re.compile(r"index/([0-9a-f]{16})/([0-9a-f]{16})")
_MS_SHIFT = 16


class SegmentName(NamedTuple):
    """Name of a segment object: its age class, its writer and its number, in hexadecimal digits.

    The number starts with the milliseconds since 1970 at which it was chosen, so age is known from
    the name. The hash comes before the writer: stores spread load over names by their first parts.
    """

    age_class: str
    writer: str
    number: str

    @property
    def path(self) -> str:
        """The object's name on the medium."""
        spread = hashlib.blake2b(f"{self.writer}{self.number}".encode(), digest_size=1).hexdigest()
        return f"{self.age_class}/{spread}/{self.writer}-{self.number}"

    @property
    def created_s(self) -> float:
        """Seconds since 1970, by the writer's clock."""
        return (int(self.number, 16) >> _MS_SHIFT) / 1000

    def expires_s(self) -> float:
        """Return the time at which its age class ends, in seconds since 1970."""
        return self.created_s + AGE_CLASSES[self.age_class]


class IndexName(NamedTuple):
    """Name of an index object: its writer and its number, in hexadecimal digits."""

    writer: str
    number: str

    @property
    def path(self) -> str:
        """The object's name on the medium."""
        return f"{INDEX}/{self.writer}/{self.number}"

    @property
    def created_s(self) -> float:
        """Seconds since 1970, by the writer's clock."""
        return (int(self.number, 16) >> _MS_SHIFT) / 1000


def parse_segment_name(path: str) -> SegmentName | None:
    """Return the name of a segment object; None for another path."""
    match = _SEGMENT_NAME.fullmatch(path)
    if match is None:
        return None
    name = SegmentName(match[1], match[3], match[4])
    return name if name.path == path else None


def parse_index_name(path: str) -> IndexName | None:
    """Return the name of an index object; None for another path."""
    match = _INDEX_NAME.fullmatch(path)
    return IndexName(match[1], match[2]) if match else None


def next_number(last: str, now_s: float) -> str:
    """Return a number for a new object: larger than `last`, and with the present time if later."""
    return f"{max(int(last or '0', 16) + 1, int(now_s * 1000) << _MS_SHIFT):016x}"


class StoredRecord(NamedTuple):
    """One record of a segment object: its key, and its first byte and length in the object."""

    key: bytes
    start: int
    nbytes: int


def head_bytes(blocks: int) -> int:
    """Return the bytes of a head with this number of entries, padded."""
    return align_up(_HEAD.size + blocks * _ENTRY.size)


def write_head(namespace: bytes, records: Sequence[tuple[bytes, int]]) -> bytes:
    """Return the head for records, given as key and length (a multiple of 4 KiB), in order."""
    at = head_bytes(len(records)) // ALIGNMENT
    entries = bytearray()
    for key, nbytes in records:
        entries += _ENTRY.pack(key, at, nbytes // ALIGNMENT)
        at += nbytes // ALIGNMENT
    head = bytearray(_HEAD.pack(_MAGIC, FORMAT, 0, len(records), 0, namespace) + entries)
    struct.pack_into("<I", head, _CRC_AT, zlib.crc32(head))
    return bytes(head.ljust(head_bytes(len(records)), b"\0"))


def read_head(head: bytes | memoryview) -> tuple[bytes, list[StoredRecord]]:
    """Return the namespace and the records of a segment object from its first bytes.

    Raises FormatError unless they hold a whole, intact head.
    """
    if len(head) < _HEAD.size:
        raise FormatError(f"a segment head has {len(head)} bytes, fewer than {_HEAD.size}")
    magic, version, _, blocks, crc, namespace = _HEAD.unpack_from(head)
    if magic != _MAGIC or version != FORMAT:
        raise FormatError(f"a segment object starts with {magic!r}, format {version}")
    end = _HEAD.size + blocks * _ENTRY.size
    if not blocks or blocks > SEGMENT_BLOCKS_MAX or len(head) < end:
        raise FormatError(f"a segment head of {len(head)} bytes lists {blocks} blocks")
    checked = bytearray(head[:end])
    struct.pack_into("<I", checked, _CRC_AT, 0)
    if zlib.crc32(checked) != crc:
        raise FormatError("a segment head fails its CRC")
    records = [
        StoredRecord(key, at * ALIGNMENT, sectors * ALIGNMENT)
        for key, at, sectors in _ENTRY.iter_unpack(head[_HEAD.size : end])
    ]
    return namespace, records


@prepared
class IndexedSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment as an index object lists it, with the path of its object.

    `namespace`: its 16-byte digest. `keys`: 16 bytes a block. `sectors`: the length of each record
    in units of 4 KiB, 4 bytes each. The records follow the head, in this order.
    """

    path: str
    namespace: bytes
    keys: bytes
    sectors: bytes

    @property
    def name(self) -> SegmentName:
        """The name of the segment object; `read_index` has checked the path."""
        age_class, _, name = self.path.split("/")
        writer, _, number = name.partition("-")
        return SegmentName(age_class, writer, number)

    @property
    def blocks(self) -> int:
        """Number of its records."""
        return len(self.keys) // KEY_BYTES


@prepared
class RemovedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Deleted blocks of a segment: the path of the segment, and their keys, 16 bytes each."""

    segment: str
    keys: bytes


@prepared
class DurableSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment with durable blocks: its path, and until when it makes no room for others.

    `until_s`: seconds since 1970. The segment still leaves when its age class ends.
    """

    path: str
    until_s: float


@prepared
class IndexObject(msgspec.Struct, frozen=True, array_like=True):
    """The content of an index object.

    `retired`: paths of segments that are about to be deleted. `replaces`: numbers of the writer's
    index objects whose content is in this one. `level`: how often its content was merged.
    `durable`: the writer's segments with durable blocks; readers before this field ignore it.
    """

    segments: list[IndexedSegment] = []
    removed: list[RemovedBlocks] = []
    retired: list[str] = []
    replaces: list[str] = []
    level: int = 0
    durable: list[DurableSegment] = []


def write_index(content: IndexObject) -> bytes:
    """Return the bytes of an index object."""
    body = msgspec.msgpack.encode(content)
    return _INDEX_HEAD.pack(_INDEX_MAGIC, FORMAT, 0, zlib.crc32(body)) + body


def read_index(data: bytes | memoryview) -> IndexObject:
    """Return the content of an index object; raise FormatError unless it is whole and valid."""
    if len(data) < _INDEX_HEAD.size:
        raise FormatError(f"an index object has {len(data)} bytes")
    magic, version, _, crc = _INDEX_HEAD.unpack_from(data)
    body = bytes(data[_INDEX_HEAD.size :])
    if magic != _INDEX_MAGIC or version != FORMAT or zlib.crc32(body) != crc:
        raise FormatError(f"an index object starts with {magic!r}, format {version}, or is damaged")
    try:
        content = msgspec.msgpack.decode(body, type=IndexObject)
    except msgspec.MsgspecError as error:
        raise FormatError(f"an index object cannot be read: {error}") from error
    for segment in content.segments:
        is_even = len(segment.keys) == KEY_BYTES * segment.blocks
        if not is_even or len(segment.sectors) != 4 * segment.blocks:
            raise FormatError("an index object lists keys and lengths that do not match")
        if not 0 < segment.blocks <= SEGMENT_BLOCKS_MAX or len(segment.namespace) != KEY_BYTES:
            raise FormatError(f"an index object lists a segment of {segment.blocks} blocks")
        if parse_segment_name(segment.path) is None:
            raise FormatError("an index object lists a segment with an impossible name")
    if any(len(removed.keys) % KEY_BYTES for removed in content.removed):
        raise FormatError("an index object lists keys of a wrong length")
    return content
