"""Footers: what was freed stays freed over a close, however much it was; and nothing else goes."""

import pytest

from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import FREED_PER_REGION, SECTOR, Geometry, parse_snapshot
from holdfast.tiers.disk.tier import DiskTier

REGION_BYTES, REGIONS = 64 * SECTOR, 4
BLOCKS = Blocks(SECTOR - 144)
"""Sixty records of one sector fit into a region, in front of its footer."""

COUNT = 60 * (REGIONS - 1)


def tier_on(medium, **changes):
    config = DiskConfig(path="memory", capacity_bytes=medium.size, **changes)
    return DiskTier(config, None, lambda _: medium)


def numbers_of(tier):
    known = {BLOCKS.key(n): n for n in range(2 * COUNT)}
    return [known[survivor.header.key] for survivor in tier.survivors()]


@pytest.fixture
def medium():
    return MemoryExtents.formatted(REGION_BYTES, REGIONS)


@pytest.fixture
def places(medium):
    """Fill all regions but one and close; return the places by number."""
    tier = tier_on(medium)
    found = BLOCKS.save(tier, range(COUNT))
    tier.close()
    return found


def freed_with(medium, places, freed, **changes):
    tier = tier_on(medium, **changes)
    assert len(numbers_of(tier)) == COUNT
    tier.free([places[n] for n in freed])
    return tier


@pytest.mark.parametrize("every", [2, 3, 5, 20])
def test_what_was_freed_stays_freed_over_every_close(medium, places, every):
    freed = set(range(0, COUNT, every))
    freed_with(medium, places, freed).close()
    left = [n for n in range(COUNT) if n not in freed]
    for _ in range(3):
        tier = tier_on(medium)
        assert numbers_of(tier) == left
        assert tier.usage().records == len(left)
        assert set(BLOCKS.load(tier, left, [places[n] for n in left])) == {Outcome.OK}
        BLOCKS.expect_nothing(tier, sorted(freed), [places[n] for n in sorted(freed)])
        tier.close()


def test_what_was_freed_before_a_snapshot_stays_freed_after_a_crash(medium, places):
    freed = set(range(0, COUNT, 2))
    tier = freed_with(medium, places, freed, snapshot_s=0.0)
    BLOCKS.save(tier, [COUNT])  # whoever writes takes the snapshot
    left = [n for n in range(COUNT + 1) if n not in freed]
    assert numbers_of(tier_on(MemoryExtents(medium.image))) == left


def test_little_that_was_freed_costs_no_footer(medium, places):
    before = len(medium.log)
    freed_with(medium, places, range(FREED_PER_REGION * REGIONS)).close()
    geometry = Geometry.of(REGION_BYTES, REGIONS)
    assert all(write.offset < geometry.regions_at for write in medium.log[before:])
    freed_with_more = tier_on(medium)
    list(freed_with_more.survivors())
    freed_with_more.free([places[-1]])
    freed_with_more.close()
    assert any(write.offset >= geometry.regions_at for write in medium.log[before:])


def test_what_is_freed_while_a_footer_is_written_is_left_to_the_next_snapshot(
    medium, places, monkeypatch
):
    freed = set(range(0, COUNT, 2))
    tier, late = freed_with(medium, places, freed), [1, COUNT - 2]
    write = tier._footers._write

    def meanwhile(life, entries):
        while late:
            freed.add(number := late.pop())
            tier.free([places[number]])
        return write(life, entries)

    monkeypatch.setattr(tier._footers, "_write", meanwhile)
    tier._save_snapshot()
    tier.close()
    left = [n for n in range(COUNT) if n not in freed]
    assert numbers_of(tier_on(medium)) == left


def test_a_footer_that_can_not_be_written_again_stays_as_it_is(medium, places, monkeypatch):
    freed = set(range(0, COUNT, 2))
    tier, geometry = freed_with(medium, places, freed), Geometry.of(REGION_BYTES, REGIONS)
    write = medium.write

    def worn(offset, views):
        if offset >= geometry.regions_at:
            raise OSError(5, "Input/output error")
        write(offset, views)

    monkeypatch.setattr(medium, "write", worn)
    for number in (1, 3):  # and again whenever a snapshot is due
        tier.free([places[number]])
        freed.add(number)
        tier._save_snapshot()
    failures = tier.usage().failures
    assert 1 <= failures <= REGIONS - 1, "each region once"
    tier.close()
    monkeypatch.setattr(medium, "write", write)
    assert tier.usage().failures == failures
    assert not tier.read_only
    found = numbers_of(tier_on(medium))
    assert set(found) >= {n for n in range(COUNT) if n not in freed}
    snapshots = [
        bytes(medium.image[geometry.snapshot_at(n) :][: geometry.snapshot_bytes]) for n in (0, 1)
    ]
    whole = [parse_snapshot(blob, tier._superblock.uuid, REGIONS) for blob in snapshots]
    assert max(len(each.freed) for each in whole if each) == FREED_PER_REGION * REGIONS
