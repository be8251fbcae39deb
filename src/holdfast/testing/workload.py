"""A disk tier's life on a medium in memory, and the check of whatever image is left of it."""

from __future__ import annotations

import random
from typing import NamedTuple

from holdfast.blocks.envelope import MARK_BYTES
from holdfast.clock import ManualClock
from holdfast.codec import pack
from holdfast.errors import Outcome
from holdfast.testing.damage import covered_bytes
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.payloads import key_of, record_of, world_of
from holdfast.tiers.base import Get, Place, Put
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR, Geometry
from holdfast.tiers.disk.tier import DiskTier

REGION_BYTES = 16 * SECTOR
REGIONS = 4
GEOMETRY = Geometry.of(REGION_BYTES, REGIONS)
SMALL, LARGE = world_of(SECTOR - 144), world_of(3 * SECTOR - 144)


class Life(NamedTuple):
    """What a tier did: its medium with every write, the image before, and each record by key."""

    medium: MemoryExtents
    start: bytes
    records: dict[bytes, bytes]


class Checked(NamedTuple):
    """What a tier found on an image: records yielded, and how many of them verify."""

    found: int
    verified: int


def open_tier(
    medium: MemoryExtents, clock: ManualClock | None = None, snapshot_s: float = 1e9
) -> DiskTier:
    """Open a tier with few threads on a medium."""
    config = DiskConfig(
        path="memory",
        capacity_bytes=medium.size,
        region_bytes=REGION_BYTES,
        reader_threads=1,
        writer_threads=1,
        snapshot_s=snapshot_s,
    )
    return DiskTier(config, clock, lambda _: medium)


def live(seed: int, lives: int = 3, batches: tuple[int, int] = (4, 14)) -> Life:
    """Return a random life with restarts.

    It uses every region again, and both superblocks and snapshots.
    """
    dice = random.Random(seed)  # noqa: S311 - lives must replay
    medium, clock = MemoryExtents.formatted(REGION_BYTES, REGIONS, seed), ManualClock()
    life, number = Life(medium, bytes(medium.image), {}), 0
    for _ in range(lives):
        tier = open_tier(medium, clock, snapshot_s=5.0)
        held = [survivor.place for survivor in tier.survivors()]
        for _ in range(dice.randrange(*batches)):
            number = _batch(tier, life, held, number, dice)
            clock.advance(dice.random() * 3)
        if dice.random() < 0.5:  # noqa: PLR2004 - a coin
            tier.close()
    return life


def _batch(tier: DiskTier, life: Life, held: list[Place], number: int, dice: random.Random) -> int:
    """Write some records, now and then one again, and free one; return the last one's number."""
    worlds = [dice.choice((SMALL, LARGE)) for _ in range(dice.randrange(1, 4))]
    places = tier.reserve([world.record_bytes for world in worlds]).places
    puts = []
    for place, world in zip(places, worlds, strict=True):
        number = number + 1 if dice.random() < 0.8 else max(1, number - 6)  # noqa: PLR2004 - often
        key = key_of(number, world.payload_bytes)
        puts.append(Put(place, record_of(world, key)))
        life.records[key] = bytes(puts[-1].record)
    assert tier.write(puts) == [Outcome.OK] * len(puts)
    held += places
    if dice.random() < 0.2:  # noqa: PLR2004 - now and then
        tier.free([dice.choice(held)])
    return number


def check(image: bytes | bytearray, records: dict[bytes, bytes]) -> Checked:
    """Open a tier on an image and read all it yields.

    Raises AssertionError where a record verifies that is not, byte for byte, what was written;
    FormatError where the tier refuses the file as a whole.
    """
    tier = open_tier(MemoryExtents(image))
    try:
        survivors = list(tier.survivors())
        verified = sum(_is_whole(tier, each.place, each.header.key, records) for each in survivors)
        places = [survivor.place for survivor in survivors]
        assert len(set(places)) == len(places), "two records in one place"
        assert tier.usage().records == len(survivors), "it counts other records than it yields"
        return Checked(len(survivors), verified)
    finally:
        tier.close()


def _is_whole(tier: DiskTier, place: Place, key: bytes, records: dict[bytes, bytes]) -> bool:
    written = records[key]
    into = memoryview(bytearray(len(written)))
    [outcome] = tier.read([Get(place, key, into)])
    assert outcome in (Outcome.OK, Outcome.MISS), f"a read gives {outcome}"
    world = SMALL if len(written) == SMALL.record_bytes else LARGE
    if outcome is not Outcome.OK:
        return False
    if pack.verify(into, key, world.fingerprint, world.payload_bytes) is not Outcome.OK:
        return False
    end = covered_bytes(world.payload_bytes)
    right = into[MARK_BYTES:end] == written[MARK_BYTES:end]  # a mark says where a copy lies
    assert right, f"block {key.hex()} verifies, but it is not what was written"
    return True
