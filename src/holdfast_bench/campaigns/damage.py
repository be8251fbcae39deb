"""Damage of records by bad media: flips, truncations, zeroed sectors, swaps, foreign headers."""

from __future__ import annotations

import enum
import random
from typing import Any

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES, read_header, stamp, write_header
from holdfast.codec import pack
from holdfast.tiers.disk.region import SECTOR


class Damage(enum.StrEnum):
    """Kinds of damage to a stored record."""

    FLIP = "flip"
    TRUNCATION = "truncation"
    ZEROED_SECTOR = "zeroed sector"
    SWAP = "swap"
    MISDIRECTED = "another record"
    STALE = "stale generation"
    FOREIGN_FIELD = "foreign header"
    FOREIGN_RECORD = "foreign record"


EVERY_DAMAGE = tuple(Damage)
WITHOUT_GENERATION = tuple(kind for kind in Damage if kind is not Damage.STALE)
"""Kinds for media without generations, such as memory."""

_FLIPS_MAX = 3


def covered_bytes(payload_bytes: int) -> int:
    """Return the length in bytes that header and tag protect; padding follows."""
    return HEADER_BYTES + payload_bytes + TAG_BYTES


def spoil(record: memoryview, other: memoryview, kind: Damage, rng: random.Random) -> None:
    """Damage a packed record in place; `other` is another one, of equal length and another key.

    Only SWAP changes `other`. At least one protected byte changes.
    """
    before = bytes(record)
    covered = covered_bytes(read_header(record)[0].payload_bytes)
    match kind:
        case Damage.TRUNCATION:
            at = rng.randrange(covered)
            tail = bytes(len(record)) if rng.random() < 0.5 else bytes(other)  # noqa: PLR2004 - a coin
            record[at:] = tail[at:]
        case Damage.ZEROED_SECTOR:
            at = rng.randrange(-(-covered // SECTOR)) * SECTOR
            record[at : at + SECTOR] = bytes(SECTOR)
        case Damage.SWAP:
            record[:], other[:] = bytes(other), before
        case Damage.MISDIRECTED:
            record[:] = other
        case Damage.STALE:
            stamp(record, read_header(record)[1] - rng.randrange(1, 4))
        case Damage.FOREIGN_FIELD | Damage.FOREIGN_RECORD:
            _make_foreign(record, kind, rng)
    if kind is Damage.FLIP or before[:covered] == record[:covered]:
        for at in rng.sample(range(covered), rng.randint(1, _FLIPS_MAX)):
            record[at] ^= 1 << rng.randrange(8)


def _make_foreign(record: memoryview, kind: Damage, rng: random.Random) -> None:
    """Give a record a valid header of another block: with the old tag, or with a valid one.

    A record with a valid tag differs in key, fingerprint or length, which a reader checks.
    """
    header, generation = read_header(record)
    foreign: dict[str, Any] = {
        "key": rng.randbytes(16),
        "fingerprint": rng.randbytes(16),
        "payload_bytes": header.payload_bytes - rng.randrange(1, 64),
    }
    if kind is Damage.FOREIGN_RECORD:
        field = rng.choice(list(foreign))
        pack.pack(record, header._replace(**{field: foreign[field]}))
        stamp(record, generation)
        return
    foreign |= {
        "parent": rng.randbytes(16),
        "domain": rng.randbytes(16),
        "depth": header.depth + 1,
        "tokens": header.tokens + 1,
        "raw_bytes": header.raw_bytes + 1,
        "codec": header.codec + 1,
        "seal": header.seal ^ 1,
        "epoch": header.epoch + 1,
        "nonce": rng.randbytes(12),
        "segment": rng.randbytes(8),
    }
    field = rng.choice(list(foreign))
    write_header(record, header._replace(**{field: foreign[field]}), generation)
