"""Any number of freed records stays freed after a close, and no other record is lost."""

import pytest

from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.disk.region import FREED_PER_REGION, SECTOR, RegionGeometry, parse_snapshot

REGION_BYTES, REGIONS = 64 * SECTOR, 4
BLOCKS = Blocks(SECTOR - 144)
"""Sixty records of one sector fit into a region, before its footer."""

COUNT = 60 * (REGIONS - 1)


def numbers_of(tier):
    known = {BLOCKS.key(n): n for n in range(2 * COUNT)}
    return [known[survivor.header.key] for survivor in tier.survivors()]


@pytest.fixture
def medium():
    return MemoryExtents.formatted(REGION_BYTES, REGIONS)


@pytest.fixture
def places(medium):
    """Fill all regions except one and close; return the places by number."""
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
def test_freed_records_stay_freed_after_every_close(medium, places, every):
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


def test_records_freed_before_a_snapshot_stay_freed_after_a_crash(medium, places):
    freed = set(range(0, COUNT, 2))
    tier = freed_with(medium, places, freed, snapshot_s=0.0)
    BLOCKS.save(tier, [COUNT])  # a write takes the snapshot
    left = [n for n in range(COUNT + 1) if n not in freed]
    assert numbers_of(tier_on(MemoryExtents(medium.image))) == left


def test_no_memory_of_the_snapshots_freed_records_is_kept_after_recovery(medium, places):
    freed_with(medium, places, range(0, COUNT, 20)).close()
    tier = tier_on(medium)
    assert tier._state.freed
    assert len(numbers_of(tier)) == COUNT - len(range(0, COUNT, 20))
    assert not tier._state.freed
    tier.close()


def test_few_freed_records_cause_no_footer_rewrite(medium, places):
    before = len(medium.log)
    freed_with(medium, places, range(FREED_PER_REGION * REGIONS)).close()
    geometry = RegionGeometry.of(REGION_BYTES, REGIONS)
    assert all(write.offset < geometry.regions_at for write in medium.log[before:])
    freed_with_more = tier_on(medium)
    list(freed_with_more.survivors())
    freed_with_more.free([places[-1]])
    freed_with_more.close()
    assert any(write.offset >= geometry.regions_at for write in medium.log[before:])


def test_records_freed_during_a_footer_write_go_into_the_next_snapshot(medium, places, monkeypatch):
    freed = set(range(0, COUNT, 2))
    tier, late = freed_with(medium, places, freed), [1, COUNT - 2]
    write = tier._write_footer

    def meanwhile(life, entries):
        while late:
            freed.add(number := late.pop())
            tier.free([places[number]])
        return write(life, entries)

    monkeypatch.setattr(tier, "_write_footer", meanwhile)
    tier._save_snapshot()
    tier.close()
    left = [n for n in range(COUNT) if n not in freed]
    assert numbers_of(tier_on(medium)) == left


def test_a_footer_that_cannot_be_rewritten_stays_as_it_is(medium, places, monkeypatch):
    freed = set(range(0, COUNT, 2))
    tier, geometry = freed_with(medium, places, freed), RegionGeometry.of(REGION_BYTES, REGIONS)
    write = medium.write

    def failing_write(offset, views):
        if offset >= geometry.regions_at:
            raise OSError(5, "Input/output error")
        write(offset, views)

    monkeypatch.setattr(medium, "write", failing_write)
    for number in (1, 3):  # each time a snapshot is due
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


def test_a_reclaimed_region_is_no_longer_remembered_as_not_rewritable(medium, places, monkeypatch):
    tier = freed_with(medium, places, range(0, COUNT, 2))
    with monkeypatch.context() as failing:
        failing.setattr(tier, "_write_footer", lambda *_: 0)
        tier._save_snapshot()
    assert tier._not_rewritable
    for start in range(0, 2 * COUNT, 60):
        BLOCKS.save(tier, range(start, start + 60))
    tier._save_snapshot()
    assert not tier._not_rewritable
