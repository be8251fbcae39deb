"""A namespace of blocks: one fingerprint in one domain; no hit crosses namespaces."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

from holdfast.blocks.envelope import Header, stored_bytes
from holdfast.blocks.key import KEY_BYTES

_TAG_BYTES = 8

_SIZES = struct.Struct("<QQ")
_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


class Namespace(NamedTuple):
    """The properties that all blocks of a session share. `domain` is the public id, not the key.

    `raw_bytes` is the length of a decoded payload, as the layout says. It and `block_tokens` follow
    from the fingerprint. They are part of the tuple so that a client that gives other sizes for the
    same fingerprint and domain gets another namespace. No stored size is part of it: a codec makes
    records of one namespace that have different lengths.
    """

    fingerprint: bytes
    domain: bytes
    raw_bytes: int
    block_tokens: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in memory for one decoded record: header, payload, tag and padding."""
        return stored_bytes(self.raw_bytes)


def domain_id(domain_key: bytes) -> bytes:
    """Return the public id of a domain in headers: 16 bytes that do not reveal its key."""
    return hashlib.blake2b(
        b"", key=domain_key, digest_size=KEY_BYTES, person=b"holdfast-domain"
    ).digest()


def namespace_of(header: Header) -> Namespace:
    """Return the namespace of a record from its header."""
    return _shared(header.fingerprint, header.domain, header.raw_bytes, header.tokens)


@lru_cache(maxsize=1_024)
def _shared(fingerprint: bytes, domain: bytes, raw_bytes: int, tokens: int) -> Namespace:
    """Return one object for equal namespaces, because tiers keep one per record or region."""
    return Namespace(fingerprint, domain, raw_bytes, tokens)


@lru_cache(maxsize=1_024)
def namespace_digest(namespace: Namespace) -> bytes:
    """Return 16 bytes that name a namespace outside this process, in third-party stores.

    The name depends on fingerprint and domain only.
    """
    named = namespace.fingerprint + namespace.domain
    return hashlib.blake2b(named, digest_size=KEY_BYTES, person=b"holdfast-space").digest()


def namespace_tag(namespace: Namespace, key: bytes) -> bytes:
    """Return 8 bytes that name a namespace within this process, keyed with `key`."""
    sizes = _SIZES.pack(namespace.raw_bytes & _UINT64, namespace.block_tokens & _UINT64)
    named = namespace.fingerprint + namespace.domain + sizes
    return hashlib.blake2b(named, key=key, digest_size=_TAG_BYTES).digest()
