"""A world: one fingerprint in one domain, and no hit crosses from one to another."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from holdfast.blocks.envelope import record_bytes
from holdfast.blocks.key import KEY_BYTES


class World(NamedTuple):
    """What every block of a session has in common. `domain` is the public id, not the key."""

    fingerprint: bytes
    domain: bytes
    payload_bytes: int
    block_tokens: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one record of this world in a slot or on a device."""
        return record_bytes(self.payload_bytes)


def domain_id(domain_key: bytes) -> bytes:
    """Return the 16 public bytes that name a domain in headers, without betraying its key."""
    return hashlib.blake2b(
        b"", key=domain_key, digest_size=KEY_BYTES, person=b"holdfast-domain"
    ).digest()
