"""Test payloads: a pseudo-random function of the key, so that any reader can check every byte."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from holdfast.blocks.envelope import Header, read_header
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import ALIGNMENT, align_up, aligned_buffer
from holdfast.codec import pack
from holdfast.codec.codec import Codec
from holdfast.codec.coded import decode_record, encode_record
from holdfast.errors import Outcome

UNKNOWN_CODEC = 255
"""Number of a codec that no build has, for records that nobody decodes."""

_TILE_BYTES = 64 << 10
_STEP = 0x9E37_79B9_7F4A_7C15


def key_of(number: int, seed: int = 0) -> bytes:
    """Return the 16-byte key of test block `number` of a run with this seed."""
    text = f"{seed}:{number}".encode()
    return hashlib.blake2b(text, digest_size=16, person=b"holdfast-test").digest()


def namespace_of(raw_bytes: int, seed: int = 0) -> Namespace:
    """Return a test namespace whose blocks have payloads of this many bytes."""
    return Namespace(key_of(1, -1 - seed), key_of(2, -1 - seed), raw_bytes, 128)


def payload_of(key: bytes, nbytes: int) -> memoryview:
    """Return the payload of `key`: tiles of 64 KiB, each a function of key and position.

    All tiles of all keys differ, so a sector of another block, or of another position in the same
    block, is always detected.
    """
    tile = _tile(key, align_up(min(nbytes, _TILE_BYTES)))
    tiles = -(-nbytes // _TILE_BYTES)
    counters = np.arange(1, tiles + 1, dtype=np.uint64) * np.uint64(_STEP)
    return (tile[None, :] ^ counters[:, None]).reshape(-1).view(np.uint8)[:nbytes].data


def sparse_payload_of(key: bytes, nbytes: int) -> memoryview:
    """Return the payload of `key` with zeros in every second page of 4 KiB: a codec shortens it."""
    payload = np.frombuffer(payload_of(key, align_up(nbytes)), np.uint8).copy()
    payload.reshape(-1, ALIGNMENT)[1::2] = 0
    return payload[:nbytes].data


def is_payload_of(key: bytes, found: memoryview) -> bool:
    """Whether these bytes are the payload of `key`."""
    right = np.frombuffer(payload_of(key, len(found)), np.uint8)
    # memoryview == compares item by item, which is slow.
    return np.array_equal(np.frombuffer(found, np.uint8), right)


def header_of(
    namespace: Namespace, key: bytes, parent: bytes | None = None, depth: int = 0
) -> Header:
    """Return the header of a test block; the first of its chain unless a parent is given."""
    return Header(
        key=key,
        parent=parent or namespace.fingerprint,
        fingerprint=namespace.fingerprint,
        domain=namespace.domain,
        depth=depth,
        tokens=namespace.block_tokens,
        payload_bytes=namespace.raw_bytes,
        raw_bytes=namespace.raw_bytes,
    )


def fill_record(record: memoryview, header: Header) -> None:
    """Pack the complete record of a test block into `record`, with cleared padding."""
    payload = payload_of(header.key, header.payload_bytes)
    pack.payload(record, header.payload_bytes)[:] = payload
    pack.pack(record, header)


def record_of(
    namespace: Namespace, key: bytes, parent: bytes | None = None, depth: int = 0
) -> memoryview:
    """Return the packed record of a test block in aligned memory of its own."""
    record = aligned_buffer(namespace.slot_bytes)
    fill_record(record, header_of(namespace, key, parent, depth))
    return record


def shortened(record: memoryview) -> memoryview:
    """Return a record of the same block that is shorter by at least one page, if that is possible.

    Its codec is known to no build, and its tag is right.
    """
    header, _ = read_header(record)
    nbytes = max(1, min(header.payload_bytes, header.raw_bytes - 1) // 2)
    cut = header._replace(codec=UNKNOWN_CODEC, payload_bytes=nbytes)
    into = aligned_buffer(cut.stored_bytes)
    pack.payload(into, nbytes)[:] = pack.payload(record, nbytes)
    pack.pack(into, cut)
    return into


def encoded_record(header: Header, codec: Codec) -> memoryview:
    """Return the record of a test block with a sparse payload, encoded if that makes it shorter."""
    raw, into = aligned_buffer(header.stored_bytes), aligned_buffer(header.stored_bytes)
    pack.payload(raw, header.raw_bytes)[:] = sparse_payload_of(header.key, header.raw_bytes)
    pack.pack(raw, header)
    stored = encode_record(raw, codec, into, 1)
    return into[:stored] if stored > 0 else raw


def is_right_encoded(record: memoryview, namespace: Namespace, key: bytes) -> bool:
    """Return whether a record of `encoded_record` verifies and decodes.

    Raises AssertionError if its payload is wrong. `record` may be followed by other bytes.
    """
    raw = aligned_buffer(namespace.slot_bytes)
    if decode_record(record, raw) is not Outcome.OK:
        return False
    if pack.verify(raw, key, namespace.fingerprint, namespace.raw_bytes) is not Outcome.OK:
        return False
    right = sparse_payload_of(key, namespace.raw_bytes)
    if bytes(pack.payload(raw, namespace.raw_bytes)) != bytes(right):
        raise AssertionError(f"block {key.hex()} decodes, but its payload is wrong")
    return True


def is_right(record: memoryview, namespace: Namespace, key: bytes) -> bool:
    """Return whether `record` verifies for `key`; raise AssertionError if its payload is wrong."""
    outcome = pack.verify(record, key, namespace.fingerprint, namespace.raw_bytes)
    if outcome is not Outcome.OK:
        return False
    if not is_payload_of(key, pack.payload(record, namespace.raw_bytes)):
        raise AssertionError(f"block {key.hex()} verifies, but its payload is wrong")
    return True


@lru_cache(maxsize=512)
def _tile(key: bytes, nbytes: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.shake_128(key).digest(nbytes), np.uint64)
