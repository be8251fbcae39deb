"""A namespace of blocks: one fingerprint in one domain; no hit crosses namespaces."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

from holdfast.blocks.envelope import Header, record_bytes
from holdfast.blocks.key import KEY_BYTES

_TAG_BYTES = 8

_SIZES = struct.Struct("<QQ")
_UINT64 = 0xFFFF_FFFF_FFFF_FFFF


class Namespace(NamedTuple):
    """The properties that all blocks of a session share. `domain` is the public id, not the key.

    All four fields identify the namespace. The sizes follow from the fingerprint; a client that
    gives other sizes for the same fingerprint and domain gets another namespace.
    """

    fingerprint: bytes
    domain: bytes
    payload_bytes: int
    block_tokens: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one record of this namespace in a slot or on a device."""
        return record_bytes(self.payload_bytes)


def domain_id(domain_key: bytes) -> bytes:
    """Return the public id of a domain in headers: 16 bytes that do not reveal its key."""
    return hashlib.blake2b(
        b"", key=domain_key, digest_size=KEY_BYTES, person=b"holdfast-domain"
    ).digest()


def namespace_of(header: Header) -> Namespace:
    """Return the namespace of a record from its header."""
    return _shared(header.fingerprint, header.domain, header.payload_bytes, header.tokens)


@lru_cache(maxsize=1_024)
def _shared(fingerprint: bytes, domain: bytes, payload_bytes: int, tokens: int) -> Namespace:
    """Return one object for equal namespaces, because tiers keep one per record or region."""
    return Namespace(fingerprint, domain, payload_bytes, tokens)


@lru_cache(maxsize=1_024)
def namespace_digest(namespace: Namespace) -> bytes:
    """Return 16 bytes that name a namespace outside this process, in third-party stores."""
    return hashlib.blake2b(
        _packed(namespace), digest_size=KEY_BYTES, person=b"holdfast-space"
    ).digest()


def namespace_tag(namespace: Namespace, key: bytes) -> bytes:
    """Return 8 bytes that name a namespace within this process, keyed with `key`."""
    return hashlib.blake2b(_packed(namespace), key=key, digest_size=_TAG_BYTES).digest()


def _packed(namespace: Namespace) -> bytes:
    sizes = _SIZES.pack(namespace.payload_bytes & _UINT64, namespace.block_tokens & _UINT64)
    return namespace.fingerprint + namespace.domain + sizes
