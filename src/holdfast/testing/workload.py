"""A disk tier's life on a medium in memory, and the check of whatever image is left of it."""

from __future__ import annotations

import random
import struct
import sys
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, MARK_BYTES, stamp
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

_REGION = struct.Struct("<4sIQ16sI")
_MARK = struct.Struct("<4sIQ")
# How a region and a record begin, as docs/reference/format.md has it.


class Laid(NamedTuple):
    """A record that lies somewhere, in one life of its region."""

    place: Place
    generation: int


class Life(NamedTuple):
    """What a tier did: its medium with every write, the image before, and each record by key.

    `freed` has the records that were freed, and how many writes there were until then.
    """

    medium: MemoryExtents
    start: bytes
    records: dict[bytes, bytes]
    freed: dict[Laid, int]


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
    life, number = Life(medium, bytes(medium.image), {}, {}), 0
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
        place = dice.choice(held)
        tier.free([place])
        at = GEOMETRY.regions_at + place * SECTOR
        _, _, generation = _MARK.unpack_from(life.medium.image, at)
        life.freed.setdefault(Laid(place, generation), len(life.medium.log))
    return number


def whole(image: bytes | bytearray, life: Life, writes: int = sys.maxsize) -> dict[Laid, bytes]:
    """Return the key of each record of a life that an image has whole, wherever it lies.

    A restart has to find those that were not freed within so many `writes`: nothing else excuses
    their loss. What is whole is told from the bytes written, without what recovers them: a region
    has an intact header of this file, and the record this region's generation.
    """
    uuid, found = life.start[16:32], {}
    for index in range(REGIONS):
        start = GEOMETRY.region_at(index)
        magic, crc, generation, *of = _REGION.unpack_from(image, start)
        intact = zlib.crc32(image[start + 8 : start + SECTOR]) == crc
        if (magic, *of) != (b"HFR1", uuid, index) or not intact:
            continue
        for sector in range(1, GEOMETRY.region_sectors):
            at = start + sector * SECTOR
            key = bytes(image[at + 32 : at + 48])
            record = life.records.get(key)
            laid = Laid(Place(index * GEOMETRY.region_sectors + sector), generation)
            if record is None or (laid in life.freed and life.freed[laid] <= writes):
                continue
            if _is_written(image[at : at + len(record)], record, generation):
                found[laid] = key
    return found


def _is_written(found: bytes | bytearray, record: bytes, generation: int) -> bool:
    """Whether these bytes are a record as it was written into a life of a region."""
    end = covered_bytes((SMALL if len(record) == SMALL.record_bytes else LARGE).payload_bytes)
    if found[MARK_BYTES:end] != record[MARK_BYTES:end]:
        return False
    written = bytearray(record[:HEADER_BYTES])
    stamp(memoryview(written), generation)
    return found[:MARK_BYTES] == written[:MARK_BYTES]


def check(
    image: bytes | bytearray, records: dict[bytes, bytes], required: Mapping[Laid, bytes]
) -> Checked:
    """Open a tier on an image and read all it yields.

    Raises AssertionError where a record verifies that is not, byte for byte, what was written, or
    one that is `required` is not there; FormatError where the tier refuses the file as a whole.
    """
    tier = open_tier(MemoryExtents(image))
    try:
        survivors = list(tier.survivors())
        verified = {
            (each.place, each.header.key)
            for each in survivors
            if _is_whole(tier, each.place, each.header.key, records)
        }
        places = [survivor.place for survivor in survivors]
        assert len(set(places)) == len(places), "two records in one place"
        assert tier.usage().records == len(survivors), "it counts other records than it yields"
        lost = [laid for laid, key in required.items() if (laid.place, key) not in verified]
        assert not lost, f"{len(lost)} of {len(required)} whole records are lost, first {lost[0]}"
        return Checked(len(survivors), len(verified))
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
