"""Recovery after a close or a crash: which records, in which order, while the tier serves."""

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.payloads import is_right
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.base import NOWHERE, TierGet, TierPut
from holdfast.tiers.disk.region import SECTOR

REGION_BYTES = 16 * SECTOR
BLOCKS = Blocks(3 * SECTOR - 144)
"""Four records of three sectors fit into a region."""


def new_medium(regions=4):
    return MemoryExtents.formatted(REGION_BYTES, regions)


def filled():
    """Return a medium whose four regions are full, and the closed tier that filled it."""
    medium = new_medium()
    tier = tier_on(medium)
    BLOCKS.save(tier, range(16))
    tier.close()
    return medium, tier


def reopened(medium):
    """Return a tier on a copy of the medium, as after kill -9."""
    return tier_on(MemoryExtents(medium.image))


def numbers_of(survivors):
    known = {BLOCKS.key(n): n for n in range(200)}
    return [known[survivor.header.key] for survivor in survivors]


# Which records are recovered.


def test_after_a_close_all_records_are_recovered_oldest_first():
    medium = new_medium()
    tier = tier_on(medium)
    BLOCKS.save(tier, range(10))
    tier.close()
    assert numbers_of(reopened(medium).survivors()) == list(range(10))


def test_after_a_crash_closed_and_open_regions_are_recovered():
    medium = new_medium()
    tier = tier_on(medium)
    BLOCKS.save(tier, range(10))
    again = reopened(medium)
    assert numbers_of(again.survivors()) == list(range(10))


def test_a_second_crash_loses_no_more_records():
    medium = new_medium(8)
    for turn in range(4):
        tier = tier_on(medium)
        assert numbers_of(tier.survivors()) == list(range(5 * turn))
        BLOCKS.save(tier, range(5 * turn, 5 * turn + 5))


def test_a_scan_skips_torn_records_and_unwritten_gaps():
    medium = new_medium()
    tier = tier_on(medium)
    places = tier.reserve([BLOCKS.namespace.slot_bytes] * 4).places
    puts = [TierPut(places[n], BLOCKS.record(n)) for n in (0, 2, 3)]
    assert tier.write(puts) == [Outcome.OK] * 3
    torn = tier._regions.offset(places[2]) + 2 * SECTOR
    medium.image[torn : torn + SECTOR] = bytes(SECTOR)
    assert numbers_of(reopened(medium).survivors()) == [0, 3]


def test_a_scanned_region_gets_its_footer_at_the_next_write():
    medium = new_medium()
    BLOCKS.save(tier_on(medium), range(3))
    tier = tier_on(medium)
    assert numbers_of(tier.survivors()) == [0, 1, 2]
    BLOCKS.save(tier, [3])
    medium.fails = lambda what, at, nbytes: what == "read" and nbytes == REGION_BYTES - SECTOR
    assert numbers_of(reopened(medium).survivors()) == [0, 1, 2, 3]
    assert tier._regions.rows()[0].footer_bytes == SECTOR


def test_records_of_an_earlier_life_are_not_recovered():
    medium = new_medium(1)
    tier = tier_on(medium)
    BLOCKS.save(tier, range(4))
    BLOCKS.save(tier, [4])
    assert numbers_of(reopened(medium).survivors()) == [4]


def test_records_freed_before_a_close_stay_freed():
    medium = new_medium()
    tier = tier_on(medium)
    places = BLOCKS.save(tier, range(10))
    tier.free([places[1], places[5], *places[8:]])
    tier.close()
    for _ in range(2):
        tier = tier_on(medium)
        assert numbers_of(tier.survivors()) == [0, 2, 3, 4, 6, 7]
        tier.close()


def test_a_region_whose_records_were_all_freed_stays_free_after_a_close():
    medium = new_medium(12)
    tier = tier_on(medium)
    places = BLOCKS.save(tier, range(20))
    tier.free(places[:8])
    tier.close()
    left = list(range(8, 20))
    for more in range(20, 23):  # a change, so that each close writes a snapshot
        tier = tier_on(medium)
        assert tier.usage().records == 0
        assert numbers_of(tier.survivors()) == left
        BLOCKS.save(tier, [more])
        left.append(more)
        tier.close()
    assert numbers_of(reopened(medium).survivors()) == left


def test_freed_records_of_an_earlier_life_do_not_count():
    medium, clock = new_medium(2), ManualClock()
    tier = tier_on(medium, clock)
    places = BLOCKS.save(tier, range(8))
    tier.free(places[:1])
    clock.advance(100)
    BLOCKS.save(tier, [8])
    assert BLOCKS.save(tier, range(9, 12))[0] == places[1]
    found = numbers_of(reopened(medium).survivors())
    assert found == [4, 5, 6, 7, 8, 9, 10, 11]


def test_no_snapshot_is_written_before_the_scan():
    medium = new_medium()
    tier = tier_on(medium)
    places = BLOCKS.save(tier, range(8))
    tier.free(places[:1])
    tier.close()
    tier = tier_on(medium)
    BLOCKS.save(tier, [20])
    tier.close()
    assert numbers_of(reopened(medium).survivors()) == [1, 2, 3, 4, 5, 6, 7, 20]


def test_incarnations_never_repeat_a_generation():
    medium = new_medium()
    seen = set()
    for _ in range(5):
        tier = tier_on(medium)
        BLOCKS.save(tier, range(5))
        generations = {row.generation for row in tier._regions.rows() if row.generation}
        fresh = {generation for generation in generations if generation not in seen}
        assert len(fresh) == 2
        assert not seen or min(fresh) > max(seen)
        seen |= fresh


def test_a_lost_superblock_repeats_no_generation():
    medium = new_medium()
    for _ in range(3):
        last = tier_on(medium)
        BLOCKS.save(last, range(2))
    newest = last._superblock.incarnation
    medium.image[newest % 2 * SECTOR] ^= 1
    assert tier_on(medium)._superblock.incarnation == newest + 1


# Serving while recovering.


def test_a_region_reused_before_its_scan_is_skipped():
    tier = tier_on(filled()[0])
    BLOCKS.save(tier, range(100, 104))
    assert numbers_of(tier.survivors()) == list(range(4, 16))
    assert tier.usage().records == 16


def test_a_region_is_not_reused_while_its_survivors_are_read():
    tier = tier_on(filled()[0])
    survivors, held = tier.survivors(), {}
    for turn, survivor in enumerate(survivors):
        held[survivor.place] = survivor.header.key
        found = BLOCKS.reserve(tier)
        for key, place, _ in found.dropped:
            assert held.pop(place, key) == key
        assert found.places != [NOWHERE]
        put = TierPut(found.places[0], BLOCKS.record(100 + turn))
        assert tier.write([put]) == [Outcome.OK]
        assert found.places[0] not in held
        held[found.places[0]] = BLOCKS.key(100 + turn)
    assert tier.usage().records == len(held)
    for place, key in held.items():
        into = memoryview(bytearray(BLOCKS.namespace.slot_bytes))
        assert tier.read([TierGet(place, key, into, BLOCKS.namespace)]) == [Outcome.OK]
        assert is_right(into, BLOCKS.namespace, key)


def test_an_abandoned_iteration_of_survivors_does_not_block_the_tier():
    tier = tier_on(filled()[0])
    survivors = tier.survivors()
    next(survivors)
    survivors.close()
    for number in range(100, 140):
        BLOCKS.save(tier, [number])


def test_closing_the_tier_ends_the_iteration_of_survivors():
    tier = tier_on(filled()[0])
    survivors = tier.survivors()
    next(survivors)
    tier.close()
    assert len(list(survivors)) <= 3


def test_an_unreadable_region_loses_its_own_records_only():
    medium, tier = filled()
    start = tier._superblock.geometry.region_at(1)
    medium.fails = lambda what, at, nbytes: start <= at < start + REGION_BYTES
    tier = tier_on(medium)
    assert numbers_of(tier.survivors()) == [0, 1, 2, 3, *range(8, 16)]
    for number in range(100, 130):
        BLOCKS.save(tier, [number])
    assert not tier.read_only


def test_a_region_with_an_unreadable_body_loses_its_own_records_only():
    medium, tier = filled()
    start = tier._superblock.geometry.region_at(1)
    medium.fails = lambda what, at, nbytes: what == "read" and start < at < start + REGION_BYTES
    tier = tier_on(medium)
    assert numbers_of(tier.survivors()) == [0, 1, 2, 3, *range(8, 16)]


@pytest.mark.parametrize("region_sectors", [16, 4096])
def test_an_unreadable_footer_loses_no_record(region_sectors):
    region_bytes = region_sectors * SECTOR
    medium = MemoryExtents.formatted(region_bytes, 4)
    tier = tier_on(medium)
    BLOCKS.save(tier, range(3))
    tier.close()
    footer = tier._superblock.geometry.region_at(1) - SECTOR
    medium.fails = lambda what, at, nbytes: what == "read" and at <= footer < at + nbytes
    tier = tier_on(medium)
    assert numbers_of(tier.survivors()) == [0, 1, 2]
    assert tier.usage().failures == 1
    tier.close()
    medium.fails = lambda what, at, nbytes: what == "read" and nbytes > 1 << 14
    tier = tier_on(medium)
    assert numbers_of(tier.survivors()) == [0, 1, 2]
    assert tier.usage().failures == 0


def test_a_bad_sector_in_a_region_without_footer_loses_one_record():
    medium = new_medium()
    tier = tier_on(medium)
    bad = tier._regions.offset(BLOCKS.save(tier, range(3))[1]) + SECTOR
    again = MemoryExtents(medium.image)
    again.fails = lambda what, at, nbytes: what == "read" and at <= bad < at + nbytes
    tier = tier_on(again)
    assert numbers_of(tier.survivors()) == [0, 2]
    assert tier.usage().failures == 1


def test_not_every_sector_of_a_failing_device_is_read():
    medium = MemoryExtents.formatted(4096 * SECTOR, 1)
    tier = tier_on(medium)
    BLOCKS.save(tier, range(3))
    asked = []
    start = tier._superblock.geometry.region_at(0)
    again = MemoryExtents(medium.image)
    again.fails = lambda what, at, nbytes: what == "read" and at > start and not asked.append(at)
    assert not numbers_of(tier_on(again).survivors())
    assert len(asked) < 300
