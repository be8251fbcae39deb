"""Encode a packed record with a codec, and decode it into a raw record again.

A record is encoded before it is sealed, and opened before it is decoded. An encoded record has a
header, a tag and padding of its own, so a reader without the codec can still verify it.
"""

from __future__ import annotations

from typing import Final

from holdfast.blocks.envelope import (
    CODEC_NONE,
    HEADER_BYTES,
    SEAL_NONE,
    TAG_BYTES,
    header_of_record,
)
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.codec import Codec, find_codec
from holdfast.codec.pack import check_without_key, matches, pack, payload
from holdfast.errors import CodecMismatchError, FormatError, Outcome

NOT_SHORTER: Final = 0
"""Encoding saves less than 5 %, so the record is stored raw."""

MISMATCH: Final = -1
"""The codec failed, or its result decodes to other bytes; the record is stored raw."""

DAMAGED: Final = -2
"""The record to encode does not verify, and a new tag would hide its damage."""


def encode_record(record: memoryview, codec: Codec, into: memoryview, element_bytes: int) -> int:
    """Write the encoded form of a packed raw record into `into`, of at least the same length.

    Returns the bytes of the encoded record with its padding. If there is no encoded record, returns
    NOT_SHORTER, MISMATCH or DAMAGED, which are not positive; `into` is undefined then.
    """
    header = header_of_record(record)
    if header is None or (header.codec, header.seal) != (CODEC_NONE, SEAL_NONE):
        return DAMAGED
    if not matches(record, header):
        return DAMAGED
    raw = payload(record, header.payload_bytes)
    try:
        nbytes = codec.encode(raw, payload(into, header.payload_bytes), element_bytes)
    except CodecMismatchError:
        return MISMATCH
    except Exception:  # noqa: BLE001  # a codec of another package; the raw record is intact
        return MISMATCH
    if nbytes <= 0:
        return NOT_SHORTER
    encoded = header._replace(codec=codec.number, payload_bytes=nbytes)
    pack(into[: encoded.stored_bytes], encoded)
    return encoded.stored_bytes


def decode_record(record: memoryview, into: memoryview) -> Outcome:
    """Verify an unsealed record, then decode it; see `decode_verified`."""
    header = header_of_record(record)
    if header is None or not matches(record, header):
        return Outcome.CORRUPT
    return decode_verified(record, into)


def decode_verified(record: memoryview, into: memoryview) -> Outcome:
    """Write a record that was just verified into `into` as a raw record with a tag of its own.

    Its tag is not checked again. Returns UNREADABLE if this build does not have the codec, or the
    codec fails for another reason than its input; CORRUPT if the record is too short, does not
    decode, or decodes to more bytes than `into` has room for. `into` is undefined after both.
    """
    header = header_of_record(record)
    if header is None or header.seal != SEAL_NONE:
        return Outcome.CORRUPT
    if len(record) < HEADER_BYTES + header.payload_bytes + TAG_BYTES:
        return Outcome.CORRUPT
    if len(into) < HEADER_BYTES + header.raw_bytes + TAG_BYTES:
        return Outcome.CORRUPT
    stored, raw = payload(record, header.payload_bytes), payload(into, header.raw_bytes)
    if header.codec == CODEC_NONE:
        if len(stored) != len(raw):
            return Outcome.CORRUPT
        raw[:] = stored
    elif (codec := find_codec(header.codec)) is None:
        return Outcome.UNREADABLE
    else:
        try:
            codec.decode(stored, raw)
        except FormatError:
            return Outcome.CORRUPT
        except Exception:  # noqa: BLE001  # a codec of another package, or no memory
            return Outcome.UNREADABLE
    pack(into, header._replace(codec=CODEC_NONE, payload_bytes=header.raw_bytes))
    return Outcome.OK


def check_reported(record: memoryview, key: bytes, namespace: Namespace) -> Outcome:
    """Verify a record that a reader has reported, as far as that is possible without a data key.

    Like `pack.check_without_key`, but an unsealed record that does not decode is CORRUPT, too.
    """
    outcome, header = check_without_key(record, key, namespace), header_of_record(record)
    if outcome is not Outcome.OK or header is None or header.codec == CODEC_NONE:
        return outcome
    decoded = decode_verified(record, aligned_buffer(namespace.slot_bytes))
    return Outcome.CORRUPT if decoded is Outcome.CORRUPT else Outcome.OK
