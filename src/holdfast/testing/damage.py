"""What bad media do to records: flips, truncations, zeroed sectors, swaps, foreign headers."""

from __future__ import annotations

import enum
import random
from typing import Any

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES, read_header, stamp, write_header
from holdfast.codec import pack
from holdfast.tiers.disk.region import SECTOR


class Damage(enum.StrEnum):
    """What may become of a record where it lies."""

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
"""Where a record's generation means nothing: memory is not reclaimed in generations."""

_FLIPS_MAX = 3


def covered_bytes(payload_bytes: int) -> int:
    """Return the bytes that header and tag vouch for; behind them is padding that nobody reads."""
    return HEADER_BYTES + payload_bytes + TAG_BYTES


def spoil(record: memoryview, other: memoryview, kind: Damage, dice: random.Random) -> None:
    """Damage a packed record in place; `other` is another one, of equal length and another key.

    Only SWAP changes `other`. Whatever is drawn, something that is vouched for changes.
    """
    before = bytes(record)
    covered = covered_bytes(read_header(record)[0].payload_bytes)
    match kind:
        case Damage.TRUNCATION:
            at = dice.randrange(covered)
            tail = bytes(len(record)) if dice.random() < 0.5 else bytes(other)  # noqa: PLR2004 - a coin
            record[at:] = tail[at:]
        case Damage.ZEROED_SECTOR:
            at = dice.randrange(-(-covered // SECTOR)) * SECTOR
            record[at : at + SECTOR] = bytes(SECTOR)
        case Damage.SWAP:
            record[:], other[:] = bytes(other), before
        case Damage.MISDIRECTED:
            record[:] = other
        case Damage.STALE:
            stamp(record, read_header(record)[1] - dice.randrange(1, 4))
        case Damage.FOREIGN_FIELD | Damage.FOREIGN_RECORD:
            _make_foreign(record, kind, dice)
    if kind is Damage.FLIP or before[:covered] == record[:covered]:
        _flip(record[:covered], dice)


def _flip(part: memoryview, dice: random.Random) -> None:
    for at in dice.sample(range(len(part)), dice.randint(1, _FLIPS_MAX)):
        part[at] ^= 1 << dice.randrange(8)


def _make_foreign(record: memoryview, kind: Damage, dice: random.Random) -> None:
    """Give a record a good header of another block: with the old tag, or whole, tag and all.

    A whole one differs in key, fingerprint or length, which a reader knows.
    """
    header, generation = read_header(record)
    strange: dict[str, Any] = {
        "key": dice.randbytes(16),
        "fingerprint": dice.randbytes(16),
        "payload_bytes": header.payload_bytes - dice.randrange(1, 64),
    }
    if kind is Damage.FOREIGN_RECORD:
        field = dice.choice(list(strange))
        pack.pack(record, header._replace(**{field: strange[field]}))
        stamp(record, generation)
        return
    strange |= {
        "parent": dice.randbytes(16),
        "domain": dice.randbytes(16),
        "depth": header.depth + 1,
        "tokens": header.tokens + 1,
        "raw_bytes": header.raw_bytes + 1,
        "codec": header.codec + 1,
        "seal": header.seal ^ 1,
        "epoch": header.epoch + 1,
        "nonce": dice.randbytes(12),
        "segment": dice.randbytes(8),
    }
    field = dice.choice(list(strange))
    write_header(record, header._replace(**{field: strange[field]}), generation)
