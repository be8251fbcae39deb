"""Power cuts, kill -9 and damage to every class of bytes: a miss at worst, never a wrong byte."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.errors import FormatError, Outcome
from holdfast.testing.extents import MemoryExtents, crash_image
from holdfast.testing.payloads import is_right, key_of, record_of, world_of
from holdfast.tiers.base import Get, Put
from holdfast.tiers.disk import DiskTier
from holdfast.tiers.disk_file import DiskConfig
from holdfast.tiers.region import SECTOR, Geometry

REGION_BYTES = 16 * SECTOR
SMALL, LARGE = world_of(SECTOR - 144), world_of(3 * SECTOR - 144)


def tier_on(medium, clock=None, **changes):
    config = DiskConfig(path="memory", capacity_bytes=medium.size, **changes)
    return DiskTier(config, clock, lambda _: medium)


def check_survivors(image):
    """Open a tier on an image and read all it yields; how many there are and how many verify.

    Raises AssertionError where a record verifies with wrong bytes.
    """
    tier = tier_on(MemoryExtents(image))
    try:
        found = list(tier.survivors())
        verified = 0
        for survivor in found:
            world = SMALL if survivor.header.payload_bytes == SMALL.payload_bytes else LARGE
            into = memoryview(bytearray(world.record_bytes))
            [outcome] = tier.read([Get(survivor.place, survivor.header.key, into)])
            assert outcome in {Outcome.OK, Outcome.MISS}
            if outcome is Outcome.OK:
                verified += is_right(into, world, survivor.header.key)
        places = [survivor.place for survivor in found]
        assert len(set(places)) == len(places)
        assert tier.usage().records == len(found)
        return len(found), verified
    finally:
        tier.close()


def worked_medium(seed):
    """A medium after a random workload with restarts, and its image before it.

    It reuses every region, both superblocks and both snapshots.
    """
    chosen = random.Random(seed)
    medium, clock = MemoryExtents.formatted(REGION_BYTES, 4), ManualClock()
    start, number = bytes(medium.image), 0
    for _ in range(3):
        tier = tier_on(medium, clock, snapshot_s=5.0, writer_threads=1)
        held = [survivor.place for survivor in tier.survivors()]
        for _ in range(chosen.randrange(4, 14)):
            worlds = [chosen.choice((SMALL, LARGE)) for _ in range(chosen.randrange(1, 4))]
            places = tier.reserve([world.record_bytes for world in worlds]).places
            puts = []
            for place, world in zip(places, worlds, strict=True):
                # Now and then the same block again, in a later place or life.
                number = number + 1 if chosen.random() < 0.8 else max(1, number - 6)
                puts.append(Put(place, record_of(world, key_of(number, world.payload_bytes))))
            assert tier.write(puts) == [Outcome.OK] * len(puts)
            held += places
            if chosen.random() < 0.2:
                tier.free([chosen.choice(held)])
            clock.advance(chosen.random() * 3)
        if chosen.random() < 0.5:
            tier.close()
    return medium, start


@pytest.mark.parametrize("seed", range(6))
def test_no_power_cut_shows_a_wrong_byte(seed):
    """Every state: a prefix of the writes, unflushed 512-byte sectors there or not."""
    medium, start = worked_medium(seed)
    chosen = random.Random(seed)
    yielded = verified = refused = 0
    for _ in range(500):
        image = crash_image(start, medium.log, chosen)
        found, right = check_survivors(image)
        yielded += found
        verified += right
        refused += found - right
    assert verified > 1_000, "the states must have something to lose"
    assert refused < yielded, yielded


@pytest.mark.soak
def test_no_power_cut_shows_a_wrong_byte_at_length(soak_s):
    end, seed = time.monotonic() + soak_s, 1_000
    while time.monotonic() < end:
        medium, start = worked_medium(seed)
        for state in range(500):
            check_survivors(crash_image(start, medium.log, random.Random(seed * 500 + state)))
        seed += 1


@pytest.mark.parametrize("seed", range(4))
def test_after_kill_9_every_finished_record_is_warm(seed):
    """What the kernel was given stays: each prefix of the log, whole."""
    medium, start = worked_medium(seed)
    image = bytearray(start)
    warm = 0
    for write in medium.log:
        image[write.offset : write.offset + len(write.data)] = write.data
        found, right = check_survivors(image)
        assert found == right, "nothing is torn, so whatever is yielded verifies"
        warm += right
    assert warm > 300


GEOMETRY = Geometry.of(REGION_BYTES, 4)


# Where each class of bytes begins in its structure, and ends.
IN_SUPERBLOCK = {"superblock": (0, 56)}
IN_SNAPSHOT = {"snapshot": (0, 200)}
IN_REGION = {
    "region header": (0, 40),
    "footer entry": (REGION_BYTES - 64 - 4 * 136, REGION_BYTES - 64),
    "footer trailer": (REGION_BYTES - 64, REGION_BYTES),
}
IN_RECORD = {
    "record mark": (0, 16),
    "record identity": (16, 128),
    "record payload": (128, SECTOR - 16),
    "record tag": (SECTOR - 16, SECTOR),
}
CLASSES = [*IN_SUPERBLOCK, *IN_SNAPSHOT, *IN_REGION, *IN_RECORD]


def byte_class(name, chosen):
    """A range of bytes of one class; (start, end) in the image of `worked_medium`."""
    region = GEOMETRY.region_at(chosen.randrange(4))
    for structure, at in (
        (IN_SUPERBLOCK, chosen.randrange(2) * SECTOR),
        (IN_SNAPSHOT, GEOMETRY.snapshot_at(chosen.randrange(2))),
        (IN_REGION, region),
        (IN_RECORD, region + chosen.randrange(1, 15) * SECTOR),
    ):
        if name in structure:
            start, end = structure[name]
            return at + start, at + end
    raise KeyError(name)


IMAGES = [worked_medium(seed)[0].image for seed in range(4)]


def flip(image, start, end, chosen):
    for _ in range(chosen.randrange(1, 4)):
        image[chosen.randrange(start, end)] ^= 1 << chosen.randrange(8)


def zero(image, start, end, chosen):
    at = chosen.randrange(start, end)
    image[at:end] = bytes(end - at)


def cut(image, start, end, chosen):
    """Everything behind a byte of this class never arrived."""
    at = chosen.randrange(start, end)
    image[at:] = bytes(len(image) - at)


def swap(image, start, end, chosen):
    """The sector goes where another belongs, and the other way round."""
    here = start // SECTOR * SECTOR
    there = chosen.randrange(len(image) // SECTOR) * SECTOR
    one, other = image[here : here + SECTOR], image[there : there + SECTOR]
    image[here : here + SECTOR], image[there : there + SECTOR] = other, one


def copy(image, start, end, chosen):
    """The sector is written a second time, over another."""
    here = start // SECTOR * SECTOR
    there = chosen.randrange(len(image) // SECTOR) * SECTOR
    image[there : there + SECTOR] = image[here : here + SECTOR]


def mix(image, start, end, chosen):
    """An older or younger file's bytes of this class."""
    image[start:end] = chosen.choice(IMAGES)[start:end]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("damage", [flip, zero, cut, swap, copy, mix])
@given(seed=st.integers(0, 2**32))
def test_no_damage_shows_a_wrong_byte(name, damage, seed):
    chosen = random.Random(seed)
    image = bytearray(chosen.choice(IMAGES))
    for _ in range(chosen.randrange(1, 4)):
        damage(image, *byte_class(name, chosen), chosen)
    try:
        check_survivors(image)
    except FormatError:
        # Both superblocks lost: the file is refused as a whole.
        assert image[:SECTOR] != IMAGES[0][:SECTOR]
