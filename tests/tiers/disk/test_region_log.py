"""Allocation of records in regions, without I/O: random operations against a simple model."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.envelope import read_header, stamp
from holdfast.testing import payloads
from holdfast.testing.payloads import key_of, namespace_of, record_of
from holdfast.tiers.base import NOWHERE
from holdfast.tiers.disk.region import SECTOR, ListedEntry, RegionEntry, RegionGeometry, RegionLife
from holdfast.tiers.disk.region_log import RegionLog

UUID = bytes(16)
GEOMETRY = RegionGeometry.of(16 * SECTOR, 4)
SIZES = [SECTOR, 2 * SECTOR, 5 * SECTOR]


def new_log():
    return RegionLog(GEOMETRY, UUID, first_generation=1)


def header_of(number, sectors=1):
    return payloads.header_of(namespace_of(sectors * SECTOR - 144), key_of(number))


def put(log, number, sectors=1):
    """Reserve and write one record; return its place and the blocks evicted for it."""
    [place], dropped = log.reserve([sectors * SECTOR])
    if place != NOWHERE:
        assert log.claim(place) is not None
        log.finish(place, header_of(number, sectors))
    return place, dropped


def close_full(log):
    regions = []
    while full := log.next_full():
        regions.append(full)
        log.footer_written(full[0], SECTOR)
    return regions


@given(st.integers(0, 2**32))
def test_random_operations_agree_with_a_dict(seed):
    chosen = random.Random(seed)
    log, held, reserved = new_log(), {}, {}
    for number in range(150):
        act = chosen.random()
        if act < 0.5:
            sectors = chosen.choice([1, 2, 5])
            [place], dropped = log.reserve([sectors * SECTOR])
            for key, old, _ in dropped:
                assert held.pop(old)[0] == key
            if place != NOWHERE:
                assert place not in held
                assert place not in reserved
                reserved[place] = (number, sectors)
        elif act < 0.8 and reserved:
            place = chosen.choice(list(reserved))
            written, sectors = reserved.pop(place)
            claim = log.claim(place)
            assert claim.nbytes == sectors * SECTOR
            assert claim.offset == GEOMETRY.regions_at + place * SECTOR
            if chosen.random() < 0.8:
                log.finish(place, header_of(written, sectors))
                held[place] = (key_of(written), sectors)
            else:
                log.finish(place, None)
        elif act < 0.9 and (held or reserved):
            place = chosen.choice([*held, *reserved])
            log.free([place])
            held.pop(place, None)
            reserved.pop(place, None)
        else:
            close_full(log)
        assert log.records == len(held)
        assert log.used_bytes == sum(sectors for _, sectors in held.values()) * SECTOR
    for place, (key, sectors) in held.items():
        assert log.held(place, key, sectors * SECTOR).nbytes == sectors * SECTOR
        assert log.held(place, key, sectors * SECTOR - 1) is None
        assert log.held(place, key_of(-1), sectors * SECTOR) is None
    for place in reserved:
        assert log.held(place, bytes(16), 1 << 30) is None


@given(st.lists(st.sampled_from(SIZES), max_size=60))
def test_places_never_overlap_and_leave_room_for_the_footer(sizes):
    places = new_log().reserve(sizes).places
    taken = set()
    for place, size in zip(places, sizes, strict=True):
        if place == NOWHERE:
            continue
        sectors = set(range(place, place + size // SECTOR))
        assert not sectors & taken
        taken |= sectors
        first, last = place % 16, (place % 16) + size // SECTOR
        assert first >= 1
        assert last <= 15, "the last sector belongs to the footer"
    assert sum(place == NOWHERE for place in places) < len(sizes) or not sizes


def test_impossible_sizes_get_no_place():
    sizes = [0, -SECTOR, 100, 17 * SECTOR, 15 * SECTOR, 14 * SECTOR]
    places = new_log().reserve(sizes).places
    assert places[:5] == [NOWHERE] * 5
    assert places[5] != NOWHERE


def test_the_oldest_region_is_reclaimed_and_its_keys_are_returned():
    log = new_log()
    filled = [put(log, number, 5) for number in range(8)]
    assert all(place != NOWHERE and not dropped for place, dropped in filled)
    close_full(log)
    place, dropped = put(log, 8, 5)
    assert [old for _, old, _ in dropped] == [filled[0][0], filled[1][0]]
    assert [key for key, _, _ in dropped] == [key_of(0), key_of(1)]
    assert place == filled[0][0]
    assert log.held(place, key_of(0), 1 << 20) is None
    assert log.held(place, key_of(8), 1 << 20) is not None


def test_a_free_region_is_used_before_the_oldest_is_reclaimed():
    log = new_log()
    places = [put(log, number, 5)[0] for number in range(8)]
    close_full(log)
    log.free(places[4:6])
    assert put(log, 8, 5) == (places[4], [])


@pytest.mark.parametrize("stage", ["reserved", "claimed"])
def test_a_region_with_unfinished_writes_is_never_reclaimed(stage):
    log = new_log()
    [waiting], _ = log.reserve([SECTOR])
    if stage == "claimed":
        log.claim(waiting)
    for number in range(100):
        place, _ = put(log, number, 5)
        close_full(log)
        assert place // 16 != waiting // 16 or number < 2
    if stage == "claimed":
        log.finish(waiting, header_of(999))
    else:
        log.free([waiting])
    close_full(log)
    assert any(put(log, number, 5)[0] // 16 == waiting // 16 for number in range(20))


def test_without_a_region_to_reclaim_there_is_no_place():
    log = new_log()
    log.reserve([5 * SECTOR] * 8)
    assert log.reserve([SECTOR * 5]).places == [NOWHERE]


def test_a_place_is_claimed_once():
    log = new_log()
    [place], _ = log.reserve([SECTOR])
    assert log.claim(place)
    assert log.claim(place) is None
    log.finish(place, header_of(1))
    assert log.claim(place) is None


def test_a_record_freed_while_it_is_written_stays_dead():
    log = new_log()
    [place], _ = log.reserve([SECTOR])
    log.claim(place)
    log.free([place])
    log.finish(place, header_of(1))
    assert log.held(place, key_of(1), 1 << 20) is None
    assert (log.records, log.used_bytes) == (0, 0)


def test_a_footer_lists_live_records():
    log = new_log()
    places = [put(log, number, 3)[0] for number in range(4)]
    log.free(places[1:2])
    log.close_open()
    [(life, entries)] = close_full(log)
    assert [entry.sector for entry in entries] == [1, 7, 10]
    assert [entry.head[32:48] for entry in entries] == [key_of(n) for n in (0, 2, 3)]
    assert log.freed() == [(life.region, 4)]


def test_a_life_ends_when_its_region_is_reclaimed():
    log = new_log()
    place, _ = put(log, 0, 5)
    life = log.held(place, key_of(0), 1 << 20).life
    for number in range(1, 9):
        close_full(log)
        put(log, number, 5)
    assert not log.is_current(life)


# Recovery.


def listed(number, sector, generation, sectors=1):
    record = record_of(namespace_of(sectors * SECTOR - 144), key_of(number))
    stamp(record, generation)
    return ListedEntry(read_header(record)[0], RegionEntry(bytes(record[:128]), sector, sectors))


def test_regions_are_recovered_oldest_first_and_keep_their_age():
    log = new_log()
    lives = log.add_unscanned([9, 0, 5, 7])
    assert [life.region for life in lives] == [2, 3, 0]
    for life in lives:
        assert log.begin_scan(life)
        log.load(life, [listed(life.region, 1, life.generation)], set(), SECTOR)
        log.end_scan(life)
    assert log.records == 3
    assert put(log, 10, 14)[1] == []
    assert [key for key, _, _ in put(log, 11, 14)[1]] == [key_of(2)]
    assert [key for key, _, _ in put(log, 12, 14)[1]] == [key_of(3)]


def test_a_region_reclaimed_before_its_scan_is_skipped():
    log = new_log()
    lives = log.add_unscanned([1, 2, 3, 4])
    place, dropped = put(log, 10, 14)
    assert (place // 16, dropped) == (0, [])
    assert not log.begin_scan(lives[0])
    assert log.begin_scan(lives[1])


def test_a_region_under_scan_is_not_reclaimed():
    log = new_log()
    lives = log.add_unscanned([1, 2, 3, 4])
    log.begin_scan(lives[0])
    assert put(log, 10, 14)[0] // 16 == 1
    log.load(lives[0], [listed(0, 1, 1)], set(), SECTOR)
    assert put(log, 11, 14)[0] // 16 == 2
    log.end_scan(lives[0])
    assert [key for key, _, _ in put(log, 12, 14)[1]] == [key_of(0)]


def test_freed_records_stay_freed_and_are_listed():
    log = new_log()
    [life] = log.add_unscanned([0, 3, 0, 0])
    log.begin_scan(life)
    alive = log.load(life, [listed(0, 1, 3), listed(1, 2, 3)], {1}, SECTOR)
    log.end_scan(life)
    assert [survivor.place for survivor in alive] == [18]
    assert log.freed() == [(1, 1)]


def test_a_snapshot_gets_no_more_dead_records_than_fit():
    log = RegionLog(RegionGeometry.of(64 * SECTOR, 2), UUID, first_generation=1)
    places = [put(log, n)[0] for n in range(100)]
    close_full(log)
    log.free(places[1:60:2])
    assert log.freed() == [(0, place) for place in places[1 : 2 * 16 + 1 : 2]]


def test_a_region_without_footer_gets_it_after_the_scan():
    log = new_log()
    [life] = log.add_unscanned([0, 3, 0, 0])
    log.begin_scan(life)
    found = [listed(0, 1, 3), listed(1, 5, 3)]
    log.load(life, found, set(), 0)
    assert log.next_full() is None
    log.end_scan(life)
    assert log.next_full() == (RegionLife(UUID, 1, 3), [entry for _, entry in found])


def test_a_retired_region_is_never_used():
    log = new_log()
    log.add_unscanned([0, 0, 0, 0])
    log.retire(1)
    used = {put(log, number, 14)[0] // 16 for number in range(12)}
    assert used == {0, 2, 3}


def test_a_record_costs_24_bytes():
    geometry = RegionGeometry.of(64 << 20, 4)
    log = RegionLog(geometry, UUID, first_generation=1)
    places = log.reserve([SECTOR] * 30_000).places
    for place in places:
        log.claim(place)
        log.finish(place, header_of(1))
    log.close_open()
    close_full(log)
    kept = sum(
        len(r.keys) + r.starts.itemsize * len(r.starts) + r.sectors.itemsize * len(r.sectors)
        for r in log._regions
    )
    assert kept == 24 * 30_000
    assert not any(r.heads or r.unwritten for r in log._regions)
