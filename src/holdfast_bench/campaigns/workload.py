"""Random workload of a disk tier on a medium in memory, and the check of the images it leaves."""

from __future__ import annotations

import random
import struct
import sys
import zlib
from collections.abc import Mapping
from contextlib import closing
from typing import NamedTuple

from holdfast.blocks.envelope import HEADER_BYTES, MARK_BYTES, stamp
from holdfast.clock import ManualClock
from holdfast.codec import pack
from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.base import Place, TierGet, TierPut
from holdfast.tiers.disk.region import SECTOR, RegionGeometry
from holdfast.tiers.disk.tier import DiskTier
from holdfast_bench.campaigns.damage import covered_bytes

REGION_BYTES = 16 * SECTOR
REGIONS = 4
GEOMETRY = RegionGeometry.of(REGION_BYTES, REGIONS)
SMALL, LARGE = namespace_of(SECTOR - 144), namespace_of(3 * SECTOR - 144)

_REGION = struct.Struct("<4sIQ16sI")
_MARK = struct.Struct("<4sIQ")
# The start of a region and of a record; see docs/reference/format.md.


class WrittenRecord(NamedTuple):
    """The place of a record and the generation of its region."""

    place: Place
    generation: int


class DiskLife(NamedTuple):
    """A tier's run: the medium with its log of writes, the image before, and each record by key.

    `freed`: the records that were freed, each with the number of writes before that.
    """

    medium: MemoryExtents
    start: bytes
    records: dict[bytes, bytes]
    freed: dict[WrittenRecord, int]


def open_tier(
    medium: MemoryExtents, clock: ManualClock | None = None, snapshot_s: float = 1e9
) -> DiskTier:
    """Open a tier with one reader and one writer thread on a medium."""
    return tier_on(medium, clock, reader_threads=1, writer_threads=1, snapshot_s=snapshot_s)


def live(seed: int) -> DiskLife:
    """Run a random workload with restarts, and return it.

    It reuses every region and writes both superblocks and both snapshots.
    """
    rng = random.Random(seed)  # noqa: S311 - lives must replay
    medium, clock = MemoryExtents.formatted(REGION_BYTES, REGIONS, seed), ManualClock()
    life, number = DiskLife(medium, bytes(medium.image), {}, {}), 0
    for _ in range(3):
        tier = open_tier(medium, clock, snapshot_s=5.0)
        held = [survivor.place for survivor in tier.survivors()]
        for _ in range(rng.randrange(4, 14)):
            number = _batch(tier, life, held, number, rng)
            clock.advance(rng.random() * 3)
        if rng.random() < 0.5:  # noqa: PLR2004 - a coin
            tier.close()
    return life


def _batch(
    tier: DiskTier, life: DiskLife, held: list[Place], number: int, rng: random.Random
) -> int:
    """Write records, a fifth of them again, and sometimes free one; return the last number."""
    namespaces = [rng.choice((SMALL, LARGE)) for _ in range(rng.randrange(1, 4))]
    places = tier.reserve([namespace.slot_bytes for namespace in namespaces]).places
    puts = []
    for place, namespace in zip(places, namespaces, strict=True):
        number = number + 1 if rng.random() < 0.8 else max(1, number - 6)  # noqa: PLR2004 - often
        key = key_of(number, namespace.raw_bytes)
        puts.append(TierPut(place, record_of(namespace, key)))
        life.records[key] = bytes(puts[-1].record)
    assert tier.write(puts) == [Outcome.OK] * len(puts)
    held += places
    if rng.random() < 0.2:  # noqa: PLR2004 - now and then
        place = rng.choice(held)
        tier.free([place])
        at = GEOMETRY.regions_at + place * SECTOR
        _, _, generation = _MARK.unpack_from(life.medium.image, at)
        life.freed.setdefault(WrittenRecord(place, generation), len(life.medium.log))
    return number


def whole(
    image: bytes | bytearray, life: DiskLife, writes: int = sys.maxsize
) -> dict[WrittenRecord, bytes]:
    """Return the key of each whole record in an image that was not freed within `writes` writes.

    A restart must find all of them. A record is whole if its region has an intact header of this
    file and its bytes are those written, with the region's generation. The recovery code is not
    used.
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
            written = WrittenRecord(Place(index * GEOMETRY.region_sectors + sector), generation)
            if record is None or (written in life.freed and life.freed[written] <= writes):
                continue
            if _is_written(image[at : at + len(record)], record, generation):
                found[written] = key
    return found


def _is_written(found: bytes | bytearray, record: bytes, generation: int) -> bool:
    """Whether these bytes are the record as written in this generation of a region."""
    end = covered_bytes((SMALL if len(record) == SMALL.slot_bytes else LARGE).raw_bytes)
    if found[MARK_BYTES:end] != record[MARK_BYTES:end]:
        return False
    written = bytearray(record[:HEADER_BYTES])
    stamp(memoryview(written), generation)
    return found[:MARK_BYTES] == written[:MARK_BYTES]


def check(
    image: bytes | bytearray, records: dict[bytes, bytes], required: Mapping[WrittenRecord, bytes]
) -> tuple[int, int]:
    """Open a tier on an image and read every record that it finds.

    Returns the number of records found, and of those that verify.

    Raises AssertionError if a record verifies with other bytes than written, or if a `required`
    record is missing; FormatError if the tier refuses the file.
    """
    with closing(open_tier(MemoryExtents(image))) as tier:
        survivors = list(tier.survivors())
        verified = {
            (each.place, each.header.key)
            for each in survivors
            if _is_whole(tier, each.place, each.header.key, records)
        }
        places = [survivor.place for survivor in survivors]
        assert len(set(places)) == len(places), "two records in one place"
        assert tier.usage().records == len(survivors), "usage() and survivors() disagree"
        lost = [record for record, key in required.items() if (record.place, key) not in verified]
        assert not lost, f"{len(lost)} of {len(required)} whole records are lost, first {lost[0]}"
        return len(survivors), len(verified)


def _is_whole(tier: DiskTier, place: Place, key: bytes, records: dict[bytes, bytes]) -> bool:
    written = records[key]
    into = memoryview(bytearray(len(written)))
    namespace = SMALL if len(written) == SMALL.slot_bytes else LARGE
    [outcome] = tier.read([TierGet(place, key, into, namespace)])
    assert outcome in (Outcome.OK, Outcome.MISS), f"a read gives {outcome}"
    if outcome is not Outcome.OK:
        return False
    if pack.verify(into, key, namespace.fingerprint, namespace.raw_bytes) is not Outcome.OK:
        return False
    end = covered_bytes(namespace.raw_bytes)
    right = into[MARK_BYTES:end] == written[MARK_BYTES:end]  # the mark differs from copy to copy
    assert right, f"block {key.hex()} verifies, but differs from the block written"
    return True
