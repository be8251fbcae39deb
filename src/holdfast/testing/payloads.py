"""Test payloads: a pseudo-random function of the key, so that any reader can check every byte."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from holdfast.blocks.envelope import Header, stored_bytes
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import align_up, aligned_buffer
from holdfast.codec import pack
from holdfast.errors import Outcome

_TILE_BYTES = 64 << 10
_STEP = 0x9E37_79B9_7F4A_7C15


def key_of(number: int, seed: int = 0) -> bytes:
    """Return the 16-byte key of test block `number` of a run with this seed."""
    text = f"{seed}:{number}".encode()
    return hashlib.blake2b(text, digest_size=16, person=b"holdfast-test").digest()


def namespace_of(payload_bytes: int, seed: int = 0) -> Namespace:
    """Return a test namespace whose blocks have payloads of this many bytes."""
    return Namespace(key_of(1, -1 - seed), key_of(2, -1 - seed), payload_bytes, 128)


def payload_of(key: bytes, nbytes: int) -> memoryview:
    """Return the payload of `key`: tiles of 64 KiB, each a function of key and position.

    All tiles of all keys differ, so a sector of another block, or of another position in the same
    block, is always detected.
    """
    tile = _tile(key, align_up(min(nbytes, _TILE_BYTES)))
    tiles = -(-nbytes // _TILE_BYTES)
    counters = np.arange(1, tiles + 1, dtype=np.uint64) * np.uint64(_STEP)
    return (tile[None, :] ^ counters[:, None]).reshape(-1).view(np.uint8)[:nbytes].data


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
    record = aligned_buffer(stored_bytes(namespace.raw_bytes))
    fill_record(record, header_of(namespace, key, parent, depth))
    return record


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
