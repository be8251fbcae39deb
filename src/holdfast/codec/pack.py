"""Pack a payload into a record, and verify a record before any of its bytes is used.

The tag is xxh3-128 (Yann Collet, https://xxhash.com) over the 112 identity bytes of the header and
the payload, in one pass over contiguous memory. Because the identity is included, it also detects
misdirected, swapped and stale records, which a checksum of the payload alone would accept.
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
    header_of_record,
    read_header,
    write_header,
)
from holdfast.blocks.namespace import Namespace
from holdfast.errors import FormatError, Outcome, UnknownFormatError


def pack(record: memoryview, header: Header) -> None:
    """Write header and tag around the payload that is already in `record`, at byte 128.

    Clears the padding, so that no data of the slot's previous block leaks.
    """
    write_header(record, header)
    finish(record, header.payload_bytes)


def finish(record: memoryview, payload_bytes: int) -> None:
    """Write the tag after the header and payload that are in `record`; clear the padding."""
    end = HEADER_BYTES + payload_bytes
    record[end : end + TAG_BYTES] = _tag(record, end)
    record[end + TAG_BYTES :] = bytes(len(record) - end - TAG_BYTES)


def payload(record: memoryview, payload_bytes: int) -> memoryview:
    """Return the part of `record` for the payload."""
    return record[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def verify(record: memoryview, key: bytes, fingerprint: bytes, raw_bytes: int) -> Outcome:
    """Verify a record that is neither sealed nor encoded, as it is in host memory.

    Checks header, key, fingerprint, length and tag: OK, or MISS for another block, or CORRUPT.
    """
    header = header_of_record(record)
    if header is not None and header.codec != CODEC_NONE:
        return Outcome.CORRUPT
    return verify_stored(record, key, fingerprint, raw_bytes)


def verify_stored(record: memoryview, key: bytes, fingerprint: bytes, raw_bytes: int) -> Outcome:
    """Verify a record like `verify`; it may be encoded."""
    header = header_of_record(record)
    if header is None:
        return Outcome.CORRUPT
    if header.key != key or header.fingerprint != fingerprint:
        return Outcome.MISS
    whole = header.raw_bytes == raw_bytes and lengths_agree(header) and matches(record, header)
    return Outcome.OK if whole else Outcome.CORRUPT


def lengths_agree(header: Header) -> bool:
    """Return whether the lengths of a header are possible: a codec only ever shortens a payload."""
    if header.codec == CODEC_NONE:
        return header.payload_bytes == header.raw_bytes
    return header.payload_bytes < header.raw_bytes


def matches(record: memoryview, header: Header) -> bool:
    """Return whether a record is complete, not sealed, and has the right tag for its header.

    The tag covers the stored payload, so a codec makes no difference.
    """
    end = HEADER_BYTES + header.payload_bytes
    if header.seal != SEAL_NONE or len(record) < end + TAG_BYTES:
        return False
    return _tag(record, end) == record[end : end + TAG_BYTES]


def check_without_key(record: memoryview, key: bytes, namespace: Namespace) -> Outcome:
    """Verify the record stored under a key, as far as that is possible without a data key.

    OK: it is not sealed, and intact. CORRUPT: its header is damaged or names another block, its
    lengths are impossible, it is too short, or the checksum of an unsealed record fails.
    UNREADABLE: header and length are valid, but the payload is sealed, so only a reader with the
    key can verify it; or the record is of another format, which other builds read.
    """
    try:
        header, _ = read_header(record)
    except UnknownFormatError:
        return Outcome.UNREADABLE
    except FormatError:
        return Outcome.CORRUPT
    named = (header.key, header.fingerprint, header.domain, header.raw_bytes)
    if named != (key, namespace.fingerprint, namespace.domain, namespace.raw_bytes):
        return Outcome.CORRUPT
    end = HEADER_BYTES + header.payload_bytes + TAG_BYTES
    if not lengths_agree(header) or len(record) < end:
        return Outcome.CORRUPT
    if header.seal != SEAL_NONE:
        return Outcome.UNREADABLE
    return Outcome.OK if matches(record, header) else Outcome.CORRUPT


def _tag(record: memoryview, end: int) -> bytes:
    return xxhash.xxh3_128_digest(record[MARK_BYTES:end])
