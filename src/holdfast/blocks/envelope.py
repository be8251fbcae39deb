"""The envelope: the fixed 128-byte header in front of every stored payload.

    | mark 16 | identity 112 | payload | tag 16 | padding to 4 KiB |

The *mark* (magic, CRC-32, generation) identifies this copy; the tier that stores it may rewrite it.
The *identity* identifies the block and never changes. The tag covers identity and payload, so a
flipped, truncated, swapped or foreign record cannot verify. Exact bytes: docs/reference/format.md.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.buffers import align_up
from holdfast.errors import FormatError, UnknownFormatError

MAGIC = b"HFE1"
FORMAT = 2
HEADER_BYTES = 128
MARK_BYTES = 16
TAG_BYTES = 16

CODEC_NONE = 0
"""The payload is stored as it is."""

CODEC_PARITY = 254
"""The payload is the parity of other records; no codec has this number."""

SEAL_NONE = 0
"""Tag is xxh3-128 over identity and payload."""

SEAL_AES_GCM = 1
"""Payload is AES-256-GCM ciphertext, the identity its associated data, and the tag GCM's."""

NONCE_BYTES = 12
KEY_ID_BYTES = 4

_HEADER = struct.Struct("<4sIQHBBIII16s16s16s16sII8s12s4s")
_MARK = struct.Struct("<4sIQ")
_SEAL_AT, _EPOCH_AT, _NONCE_AT = 19, 28, 112
_EPOCH = struct.Struct("<I")
_LENGTH_AT = 96
_LENGTH = struct.Struct("<I")


class Header(NamedTuple):
    """The identity of one block. Byte fields have 16 bytes unless noted; lengths are in bytes.

    `payload_bytes` is the length of the stored payload, `raw_bytes` its length once it is decoded.
    They are equal if `codec` is `CODEC_NONE`.

    `segment` (8 bytes) names the segment of the chain that the block belongs to, for placement in a
    pool; zeros if it is unknown. `epoch`, `nonce` (12 bytes) and `key_id` (4 bytes, which reveal
    nothing of the key) identify the key of a sealed record; zeros if it is not sealed.
    """

    key: bytes
    parent: bytes
    fingerprint: bytes
    domain: bytes
    depth: int
    tokens: int
    payload_bytes: int
    raw_bytes: int
    codec: int = CODEC_NONE
    seal: int = SEAL_NONE
    epoch: int = 0
    nonce: bytes = bytes(NONCE_BYTES)
    segment: bytes = bytes(SEGMENT_BYTES)
    key_id: bytes = bytes(KEY_ID_BYTES)

    @property
    def stored_bytes(self) -> int:
        """Bytes of this record on a tier: header, stored payload, tag and padding."""
        return stored_bytes(self.payload_bytes)


@lru_cache(maxsize=64)
def stored_bytes(payload_bytes: int) -> int:
    """Return the size of a record with this payload: header, payload, tag, padding to 4 KiB."""
    return align_up(HEADER_BYTES + payload_bytes + TAG_BYTES)


def record_length(record: memoryview) -> int:
    """Return the bytes of the record at the start of a buffer, as its header says.

    The header is not checked; the result is at most the length of the buffer.
    """
    (payload_bytes,) = _LENGTH.unpack_from(record, _LENGTH_AT)
    return min(stored_bytes(payload_bytes), len(record))


def write_header(record: memoryview, header: Header, generation: int = 0) -> None:
    """Write header and mark into the first 128 bytes of `record`."""
    _HEADER.pack_into(
        record, 0, MAGIC, 0, generation, FORMAT, header.codec, header.seal,
        header.depth, header.tokens, header.epoch, header.key, header.parent,
        header.fingerprint, header.domain, header.payload_bytes, header.raw_bytes, header.segment,
        header.nonce, header.key_id,
    )  # fmt: skip
    stamp(record, generation)


def resealed(head: bytes, seal: int, epoch: int, nonce: bytes, key_id: bytes) -> memoryview:
    """Return the 128 bytes of an intact header with another seal and generation 0.

    The result equals that of `write_header`, but is faster to compute, because every sealing and
    opening of a block needs it.
    """
    changed = memoryview(bytearray(head))
    changed[_SEAL_AT] = seal
    _EPOCH.pack_into(changed, _EPOCH_AT, epoch)
    changed[_NONCE_AT:] = nonce + key_id
    stamp(changed, 0)
    return changed


def stamp(record: memoryview, generation: int) -> None:
    """Write the mark: this copy is in a place of this `generation`.

    The mark is written in one assignment, because other threads may be reading or sending the
    record.
    """
    mark = _MARK.pack(MAGIC, 0, generation)
    crc = zlib.crc32(record[MARK_BYTES:HEADER_BYTES], zlib.crc32(mark[8:]))
    record[:MARK_BYTES] = _MARK.pack(MAGIC, crc, generation)


def header_of_record(record: memoryview | bytes) -> Header | None:
    """Return a record's header; None if this build cannot parse it."""
    try:
        return read_header(record)[0]
    except FormatError:
        return None


def read_header(record: memoryview | bytes) -> tuple[Header, int]:
    """Return header and generation.

    Raises FormatError if the header is damaged (too short, wrong magic or CRC), and
    UnknownFormatError if it is intact and of an earlier or later format.
    """
    head = bytes(record[:HEADER_BYTES])  # in one copy, because another thread may stamp it
    if len(head) < HEADER_BYTES:
        raise FormatError(f"envelope has {len(head)} bytes, fewer than {HEADER_BYTES}")
    (
        magic, crc, generation, version, codec, seal, depth, tokens, epoch,
        key, parent, fingerprint, domain, payload_bytes, raw_bytes, segment, nonce, key_id,
    ) = _HEADER.unpack(head)  # fmt: skip
    if magic != MAGIC:
        raise FormatError(f"envelope starts with {magic!r}, not {MAGIC!r}")
    if zlib.crc32(head[8:]) != crc:
        raise FormatError("envelope header fails its CRC")
    if version != FORMAT:
        raise UnknownFormatError(f"envelope has format {version}; this build reads {FORMAT}")
    header = Header(
        key, parent, fingerprint, domain, depth, tokens, payload_bytes, raw_bytes,
        codec, seal, epoch, nonce, segment, key_id,
    )  # fmt: skip
    return header, generation
