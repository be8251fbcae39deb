"""Pack a payload into a record and verify a record before one byte of it is used.

The tag is xxh3-128 (Yann Collet, https://xxhash.com) over the 112 identity bytes of the header and
the payload, in one pass over contiguous memory: a checksum keyed by the envelope, which also
catches misdirected, swapped and stale records that a plain payload checksum would accept.
"""

from __future__ import annotations

import xxhash

from holdfast.blocks.envelope import (
    CODEC_NONE,
    HEADER_BYTES,
    MARK_BYTES,
    SEAL_NONE,
    TAG_BYTES,
    Header,
    read_header,
    write_header,
)
from holdfast.errors import FormatError, Outcome


def pack(record: memoryview, header: Header) -> None:
    """Write header and tag around the payload that already lies in `record` at byte 128.

    Clears the padding, so that nothing of the slot's last owner goes along.
    """
    write_header(record, header)
    finish(record, header.payload_bytes)


def finish(record: memoryview, payload_bytes: int) -> None:
    """Write the tag behind the header and the payload that lie in `record`; clear the padding."""
    end = HEADER_BYTES + payload_bytes
    record[end : end + TAG_BYTES] = _tag(record, end)
    record[end + TAG_BYTES :] = bytes(len(record) - end - TAG_BYTES)


def payload(record: memoryview, payload_bytes: int) -> memoryview:
    """Return the view of `record` where the payload lies or goes."""
    return record[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def verify(record: memoryview, key: bytes, fingerprint: bytes, payload_bytes: int) -> Outcome:
    """Check header, key, fingerprint, length and tag: OK, or MISS for another block, or CORRUPT."""
    try:
        header, _ = read_header(record)
    except FormatError:
        return Outcome.CORRUPT
    if header.key != key or header.fingerprint != fingerprint:
        return Outcome.MISS
    if header.payload_bytes != payload_bytes or not matches(record, header):
        return Outcome.CORRUPT
    return Outcome.OK


def matches(record: memoryview, header: Header) -> bool:
    """Return whether a record is the whole and undamaged plain one that its header announces."""
    end = HEADER_BYTES + header.payload_bytes
    if header.codec != CODEC_NONE or header.seal != SEAL_NONE or len(record) < end + TAG_BYTES:
        return False
    return _tag(record, end) == record[end : end + TAG_BYTES]


def is_announced(record: memoryview, header: Header) -> bool:
    """Return whether `record` begins with `header`, intact and whole.

    Says nothing of the payload: whoever reads it verifies it.
    """
    try:
        return read_header(record)[0] == header
    except FormatError:
        return False


def intact(record: memoryview, header: Header) -> bool:
    """Whether a record with this header is all there, as far as can be told without a key.

    Of a sealed one only its reader can tell.
    """
    if header.seal != SEAL_NONE:
        return len(record) >= HEADER_BYTES + header.payload_bytes + TAG_BYTES
    return matches(record, header)


def _tag(record: memoryview, end: int) -> bytes:
    return xxhash.xxh3_128_digest(record[MARK_BYTES:end])
