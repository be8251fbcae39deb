"""Parity records: the XOR of the records of a row of blocks, from which any one comes back.

A *row* is a run of blocks of one chain, each on another member of a pool. Its parity record is a
record with an envelope of its own, in a namespace of its own: the block's domain, and a fingerprint
and a key that are hashes. So no lookup of a block finds it. Its payload:

    | magic 4 | count u32 | key 16, length u32, digest 8 of each block | XOR of their records |

The XOR covers a record from its identity to its tag, as it is stored: sealed if it is sealed. So
parity of sealed records reveals nothing. The length is that of this part, the digest its xxh3-64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from holdfast.blocks.envelope import (
    CODEC_NONE,
    CODEC_PARITY,
    HEADER_BYTES,
    MARK_BYTES,
    SEAL_NONE,
    TAG_BYTES,
    Header,
    header_of_record,
    stamp,
    stored_bytes,
)
from holdfast.blocks.key import KEY_BYTES
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.buffers import aligned_buffer
from holdfast.codec.coded import decode_verified
from holdfast.codec.pack import pack, payload, verify_stored
from holdfast.errors import Outcome
from holdfast.limits import PAYLOAD_BYTES_MAX

OVERHEAD_BYTES = 1_024
"""Most bytes by which the payload of a parity record is longer than that of a block."""

ROW_BLOCKS_MAX = 31
"""Most blocks in a row: the table of a longer one does not fit in `OVERHEAD_BYTES`."""

_MAGIC = b"HFP1"
_HEAD = struct.Struct("<4sI")
_ENTRY = struct.Struct("<16sI8s")
_ENVELOPE_BYTES = HEADER_BYTES - MARK_BYTES + TAG_BYTES


class RowMember(NamedTuple):
    """A block of a row: its key, and the length and the digest of the part that is protected."""

    key: bytes
    nbytes: int
    digest: bytes


class ParityTable(NamedTuple):
    """What a verified parity record says: its blocks in chain order, and the XOR of their records.

    `depth` is the number of the first block in its chain.
    """

    members: tuple[RowMember, ...]
    depth: int
    xor: memoryview


@lru_cache(maxsize=1_024)
def parity_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace of the parity records of a namespace's blocks."""
    return Namespace(
        _derived(namespace.fingerprint),
        namespace.domain,
        namespace.raw_bytes + OVERHEAD_BYTES,
        namespace.block_tokens,
    )


def parity_key(first: bytes, blocks: int) -> bytes:
    """Return the key of the parity record of a row by its first block and its number of blocks.

    So a lookup knows which blocks a record protects without reading it.
    """
    return _derived(first + blocks.to_bytes(4, "little"))


def can_protect(namespace: Namespace) -> bool:
    """Return whether parity records of a namespace are no longer than a record may be."""
    return namespace.raw_bytes + OVERHEAD_BYTES <= PAYLOAD_BYTES_MAX


class ParityRow:
    """A row that grows block by block; its memory is that of its parity record. Not thread-safe.

    It takes up to `blocks_max` blocks.
    """

    def __init__(self, first: Header, blocks_max: int) -> None:
        self.namespace = namespace_of(first)
        self.depth = first.depth
        self.segment = first.segment
        self.blocks_max = min(blocks_max, ROW_BLOCKS_MAX)
        self._members: list[RowMember] = []
        self._at = HEADER_BYTES + _HEAD.size + self.blocks_max * _ENTRY.size
        longest = self._at - HEADER_BYTES + namespace_of(first).raw_bytes + _ENVELOPE_BYTES
        self._record = aligned_buffer(stored_bytes(longest))
        self._xor_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the row takes."""
        return len(self._record)

    @property
    def first(self) -> bytes:
        """The key of its first block."""
        return self._members[0].key

    @property
    def last(self) -> bytes:
        """The key of its last block."""
        return self._members[-1].key

    def continues(self, header: Header) -> bool:
        """Return whether a block follows the last one and may be added."""
        return (
            len(self) < self.blocks_max
            and header.parent == self._members[-1].key
            and header.depth == self.depth + len(self)
            and header.segment == self.segment
            and namespace_of(header) == self.namespace
        )

    def add(self, header: Header, record: memoryview) -> None:
        """Add a block by its record, of which no byte is kept; releases the GIL."""
        part = _protected(record, header)
        into = np.frombuffer(self._record[self._at : self._at + len(part)], np.uint8)
        np.bitwise_xor(into, np.frombuffer(part, np.uint8), out=into)
        self._members.append(RowMember(header.key, len(part), xxhash.xxh3_64_digest(part)))
        self._xor_bytes = max(self._xor_bytes, len(part))

    def record(self) -> memoryview:
        """Return the parity record; the row takes no block after this."""
        body = self._record[HEADER_BYTES:]
        _HEAD.pack_into(body, 0, _MAGIC, len(self._members))
        for number, member in enumerate(self._members):
            _ENTRY.pack_into(body, _HEAD.size + number * _ENTRY.size, *member)
        # The XOR follows the table of a full row; entries of a shorter one are zeros.
        hidden = parity_namespace(self.namespace)
        header = Header(
            key=parity_key(self.first, len(self)),
            parent=hidden.fingerprint,
            fingerprint=hidden.fingerprint,
            domain=hidden.domain,
            depth=self.depth,
            tokens=hidden.block_tokens,
            payload_bytes=self._at - HEADER_BYTES + self._xor_bytes,
            raw_bytes=hidden.raw_bytes,
            codec=CODEC_PARITY,
            segment=self.segment,
        )
        whole = self._record[: header.stored_bytes]
        pack(whole, header)
        return whole


def read_parity(
    record: memoryview, first: bytes, blocks: int, namespace: Namespace
) -> ParityTable | None:
    """Verify the parity record of a row; None if it is not that."""
    hidden, key = parity_namespace(namespace), parity_key(first, blocks)
    outcome = verify_stored(record, key, hidden.fingerprint, hidden.raw_bytes)
    header = header_of_record(record) if outcome is Outcome.OK else None
    if header is None or (header.codec, header.domain) != (CODEC_PARITY, namespace.domain):
        return None
    body = payload(record, header.payload_bytes)
    if len(body) < _HEAD.size:
        return None
    magic, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or count != blocks or not 0 < count <= ROW_BLOCKS_MAX:
        return None
    if len(body) < _HEAD.size + count * _ENTRY.size:
        return None
    members = tuple(
        RowMember(*_ENTRY.unpack_from(body, _HEAD.size + number * _ENTRY.size))
        for number in range(count)
    )
    if len({member.key for member in members}) < count:
        return None
    xor_bytes = max(member.nbytes for member in members)
    if members[0].key != first or len(body) < _HEAD.size + count * _ENTRY.size + xor_bytes:
        return None
    return ParityTable(members, header.depth, body[len(body) - xor_bytes :])


def rebuild(
    table: ParityTable,
    key: bytes,
    others: Mapping[bytes, memoryview],
    namespace: Namespace,
    into: memoryview,
) -> bool:
    """Write the record of a block, rebuilt from those of all others of its row, into a buffer.

    Returns whether the result is what was protected. If not (one of the others is another record
    than that of the row), `into` is undefined. The caller verifies the record like every other.
    """
    wanted = next((member for member in table.members if member.key == key), None)
    if wanted is None or MARK_BYTES + wanted.nbytes > len(into):
        return False
    xor = np.array(np.frombuffer(table.xor, np.uint8))
    for member in table.members:
        if member is not wanted:
            part = _part(others[member.key], member, namespace)
            if part is None:
                return False
            part_of_xor = xor[: len(part)]
            np.bitwise_xor(part_of_xor, np.frombuffer(part, np.uint8), out=part_of_xor)
    part = xor[: wanted.nbytes].data
    if xxhash.xxh3_64_digest(part) != wanted.digest:
        return False
    end = MARK_BYTES + wanted.nbytes
    into[MARK_BYTES:end] = part
    size = min(stored_bytes(wanted.nbytes - _ENVELOPE_BYTES), len(into))
    into[end:size] = bytes(size - end)
    stamp(into, 0)
    header = header_of_record(into)
    return (
        header is not None
        and (header.key, namespace_of(header)) == (key, namespace)
        and len(_protected(into, header)) == wanted.nbytes
    )


def _part(record: memoryview, member: RowMember, namespace: Namespace) -> memoryview | None:
    """Return the protected part of a record if it has the right length; None if it is another.

    A target's codec may have encoded a record that was stored raw: it is decoded then.
    """
    header = header_of_record(record)
    if header is None:
        return None
    part = _protected(record, header)
    if len(part) == member.nbytes:
        return part
    if header.codec == CODEC_NONE or header.seal != SEAL_NONE:
        return None
    raw = aligned_buffer(namespace.slot_bytes)
    if decode_verified(record, raw) is not Outcome.OK:
        return None
    part = _protected(raw, header._replace(payload_bytes=header.raw_bytes))
    return part if len(part) == member.nbytes else None


def _protected(record: memoryview, header: Header) -> memoryview:
    """Return the part of a record that parity covers: identity, payload and tag."""
    return record[MARK_BYTES : HEADER_BYTES + header.payload_bytes + TAG_BYTES]


def _derived(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=KEY_BYTES, person=b"holdfast-parity").digest()
