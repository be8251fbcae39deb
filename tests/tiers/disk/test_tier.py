"""The disk tier keeps the tier contract on a real file; its errors, regions and footers."""

import threading

import pytest

from holdfast.clock import ManualClock
from holdfast.codec.pack import check_without_key
from holdfast.errors import ConfigError, Outcome
from holdfast.limits import MIB
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.tier_contract import Blocks, TierContract
from holdfast.tiers.base import TierGet, TierPut
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.region import SECTOR, parse_footer, parse_snapshot
from holdfast.tiers.disk.tier import DiskTier

REGION_BYTES = 32 * SECTOR
BLOCKS = Blocks(5 * SECTOR - 144)
"""Six records of five sectors fit into a region."""


class TestDiskTier(TierContract):
    durable = True

    def make_tier(self, folder, capacity_bytes):
        return DiskTier(DiskConfig(path=str(folder), capacity_bytes=capacity_bytes))


class TestOneRegionOfMany(TierContract):
    """Records that do not divide the region size, with one thread each."""

    durable = True

    def make_tier(self, folder, capacity_bytes):
        config = DiskConfig(
            path=str(folder),
            capacity_bytes=capacity_bytes,
            region_bytes=432 * SECTOR,
            reader_threads=1,
            writer_threads=1,
            snapshot_s=0.001,
        )
        return DiskTier(config)


def test_reads_for_moves_and_checks_are_short_calls_one_after_another():
    blocks, calls = Blocks(3 * MIB - 144), list[tuple[threading.Thread, int]]()

    def note(what, _offset, nbytes):
        if what == "read":
            calls.append((threading.current_thread(), nbytes))
        return False

    medium = MemoryExtents.formatted(16 * MIB, 4)
    tier = tier_on(medium)
    places = blocks.save(tier, range(4))
    medium.fails = note
    gets = [get._replace(is_use=False) for get in blocks.gets(range(4), places)]
    assert tier.read(gets) == [Outcome.OK] * 4
    tier.close()
    assert {thread for thread, _ in calls} == {threading.main_thread()}
    assert max(nbytes for _, nbytes in calls) == 2 * MIB


def test_beside_a_read_of_a_request_a_write_is_one_call_at_a_time():
    blocks, writers = Blocks(3 * MIB - 144), set[threading.Thread]()
    reading, go_on = threading.Event(), threading.Event()

    def hold_reads(what, _offset, _nbytes):
        if what == "read":
            reading.set()
            assert go_on.wait(120)
        else:
            writers.add(threading.current_thread())
        return False

    medium = MemoryExtents.formatted(16 * MIB, 4)
    tier = tier_on(medium)
    places = blocks.save(tier, range(1))
    medium.fails = hold_reads
    outcomes = []
    reader = threading.Thread(
        target=lambda: outcomes.extend(tier.read(blocks.gets(range(1), places)))
    )
    reader.start()
    try:
        assert reading.wait(60)
        blocks.save(tier, range(1, 9))
    finally:
        go_on.set()
        reader.join()
    assert outcomes == [Outcome.OK]
    assert writers == {threading.main_thread()}
    tier.close()


@pytest.fixture
def medium():
    return MemoryExtents.formatted(REGION_BYTES, 4)


@pytest.fixture
def clock():
    return ManualClock()


def write(tier, numbers):
    """Write blocks; return their places and outcomes."""
    puts = [TierPut(BLOCKS.reserve(tier).places[0], BLOCKS.record(n)) for n in numbers]
    return [put.place for put in puts], tier.write(puts)


# Order on the medium.


def test_a_regions_header_is_written_before_its_records(medium):
    tier = tier_on(medium)
    BLOCKS.save(tier, range(8))
    geometry = tier._superblock.geometry
    offsets = [write.offset for write in medium.log if write.data][1:]
    for region in range(2):
        start = geometry.region_at(region)
        inside = [o for o in offsets if start <= o < start + REGION_BYTES]
        assert inside[0] == start
        assert inside.count(start) == 1


def test_adjacent_records_are_written_in_one_call(medium):
    tier = tier_on(medium)
    BLOCKS.save(tier, range(6))
    records = [write for write in medium.log if len(write.data) > SECTOR]
    assert [len(write.data) for write in records] == [SECTOR + 6 * 5 * SECTOR], "with the header"


def test_records_under_a_header_that_failed_are_not_written_and_leave_the_region(medium):
    tier = tier_on(medium)
    places = [BLOCKS.reserve(tier).places[0] for _ in range(3)]
    header = medium.size - 4 * REGION_BYTES
    medium.fails = lambda what, at, nbytes: what == "write" and at == header
    puts = [TierPut(place, BLOCKS.record(n)) for n, place in enumerate(places)]
    assert tier.write(puts) == [Outcome.GONE] * 3
    medium.fails = None
    assert BLOCKS.load(tier, range(3), places) == [Outcome.MISS] * 3
    again = BLOCKS.save(tier, range(3))
    assert BLOCKS.load(tier, range(3), again) == [Outcome.OK] * 3
    tier.close()
    assert len(list(tier_on(medium).survivors())) == 3


def test_a_write_hands_no_work_to_threads_busy_with_other_writes():
    blocks = Blocks((1 << 20) - 144)
    medium = MemoryExtents.formatted(16 << 20, 4)
    tier = tier_on(medium, writer_threads=4)
    released, calls = threading.Event(), []

    def held(_, __, nbytes):
        calls.append((threading.current_thread(), nbytes))
        return threading.current_thread() is not threading.main_thread() and not released.wait(30)

    blocks.save(tier, [99])  # writes the region's header
    places = tier.reserve([1 << 20] * 7).places
    puts = [TierPut(place, blocks.record(n)) for n, place in enumerate(places)]
    medium.fails = held
    others = [threading.Thread(target=tier.write, args=([put],)) for put in puts[:3]]
    for other in others:
        other.start()
    while tier._writing < 3:
        threading.Event().wait(0.001)
    calls.clear()
    assert tier.write(puts[3:]) == [Outcome.OK] * 4
    released.set()
    for other in others:
        other.join()
    ours = [nbytes for thread, nbytes in calls if thread is threading.main_thread()]
    assert ours == [4 << 20]
    assert tier._writing == 0


def test_only_superblocks_are_flushed(medium):
    tier = tier_on(medium)
    BLOCKS.save(tier, range(20))
    tier.close()
    assert [i for i, write in enumerate(medium.log) if not write.data] == [1]


def test_a_full_region_gets_its_footer_after_its_last_write(medium):
    tier = tier_on(medium)
    [late] = BLOCKS.reserve(tier).places
    BLOCKS.save(tier, range(10))
    life = tier._regions._life(0)
    end = tier._superblock.geometry.region_at(1)

    def footer():
        return parse_footer(medium.image[end - SECTOR : end], life, REGION_BYTES // SECTOR)

    assert footer() is None
    assert tier.write([TierPut(late, BLOCKS.record(99))]) == [Outcome.OK]
    assert [header.key for header, _ in footer()] == [BLOCKS.key(n) for n in (99, 0, 1, 2, 3, 4)]


def test_snapshots_alternate_and_come_when_due(medium, clock):
    tier = tier_on(medium, clock, snapshot_s=30.0)
    geometry, uuid = tier._superblock.geometry, tier._superblock.uuid

    def sequences():
        return [
            snapshot and snapshot.sequence
            for which in range(2)
            for at in [geometry.snapshot_at(which)]
            for snapshot in [parse_snapshot(medium.image[at : at + 4096], uuid, 4)]
        ]

    BLOCKS.save(tier, range(8))
    assert sequences() == [None, None]
    clock.advance(31)
    BLOCKS.save(tier, [8])
    assert sequences() == [None, 1]
    clock.advance(31)
    BLOCKS.save(tier, [9])
    assert sequences() == [None, 1], "no region was closed and no record freed"
    BLOCKS.save(tier, range(10, 20))
    clock.advance(31)
    BLOCKS.save(tier, [20])
    assert sequences() == [2, 1]
    tier.close()
    assert sequences() == [2, 3]


# Reuse.


@pytest.mark.parametrize("sectors", [5, 7])
def test_a_read_of_a_region_reclaimed_during_the_read_is_a_miss(medium, sectors):
    """The read returns another record, or the middle of one, which does not count as corrupt."""
    tier, others = tier_on(medium), Blocks(sectors * SECTOR - 144)
    _, place = BLOCKS.save(tier, range(2))
    real = medium.read

    def slow_read(offset, views):
        for turn in range(8):
            others.save(tier, range(100 + 4 * turn, 104 + 4 * turn))
        real(offset, views)

    medium.read = slow_read
    assert BLOCKS.load(tier, [1], [place]) == [Outcome.MISS]


def test_a_lost_write_is_a_miss(medium):
    """The drive confirms a write, but keeps an earlier life's record of the same block."""
    tier = tier_on(medium)
    numbers = list(range(24))
    places = BLOCKS.save(tier, numbers)
    before = bytes(medium.image)
    again, _ = write(tier, [0])
    assert again == places[:1]
    offset = tier._regions.offset(places[0])
    medium.image[offset : offset + 5 * SECTOR] = before[offset : offset + 5 * SECTOR]
    assert BLOCKS.load(tier, [0], again) == [Outcome.MISS]


def test_damaged_records_are_returned_and_fail_verification(medium):
    tier = tier_on(medium)
    places = BLOCKS.save(tier, range(3))
    for number, at in enumerate((0, 200, 5 * SECTOR - 10)):
        medium.image[tier._regions.offset(places[number]) + at] ^= 1
    assert BLOCKS.load(tier, range(3), places) == [Outcome.CORRUPT] * 3


def test_a_buffer_shorter_than_the_record_is_a_miss(medium):
    tier = tier_on(medium)
    [place] = BLOCKS.save(tier, [0])
    short = BLOCKS.record(9)[: 4 * SECTOR]
    assert tier.read([TierGet(place, BLOCKS.key(0), short, BLOCKS.namespace)]) == [Outcome.MISS]


@pytest.mark.parametrize("nbytes", [4 * SECTOR, 6 * SECTOR])
def test_a_record_of_another_length_than_reserved_is_refused(medium, nbytes):
    tier = tier_on(medium)
    [place] = tier.reserve([nbytes]).places
    assert tier.write([TierPut(place, BLOCKS.record(0))]) == [Outcome.CORRUPT]
    BLOCKS.expect_nothing(tier, [0], [place])
    assert tier.usage().records == 0


def test_bytes_that_are_not_a_record_are_refused(medium):
    tier = tier_on(medium)
    [place] = tier.reserve([SECTOR]).places
    assert tier.write([TierPut(place, memoryview(bytearray(SECTOR)))]) == [Outcome.CORRUPT]


# Errors of the medium.


def test_a_failed_write_fails_its_record_only(medium):
    tier = tier_on(medium)
    bad = tier._superblock.geometry.region_at(0) + 11 * SECTOR
    medium.fails = lambda what, at, nbytes: what == "write" and at <= bad < at + nbytes
    places, outcomes = write(tier, range(5))
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.GONE, Outcome.OK, Outcome.OK]
    medium.fails = None
    outcomes = BLOCKS.load(tier, range(5), places)
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]
    assert (tier.usage().records, tier.usage().failures) == (4, 1)


def test_a_record_changed_while_it_is_written_keeps_its_place_and_its_name(medium):
    """Another process may map the memory of a record, and write to it at any time."""
    tier, record = tier_on(medium), BLOCKS.record(1)
    [place] = BLOCKS.reserve(tier).places

    def change(_what, _at, nbytes):
        if nbytes >= len(record):
            record[32:48] = BLOCKS.key(2)
        return False

    medium.fails = change
    assert tier.write([TierPut(place, record)]) == [Outcome.OK]
    medium.fails = None
    into = memoryview(bytearray(len(record)))
    for number, outcome in ((1, Outcome.OK), (2, Outcome.MISS)):
        get = TierGet(place, BLOCKS.key(number), into, BLOCKS.namespace)
        assert tier.read([get]) == [outcome]
    assert check_without_key(into, BLOCKS.key(1), BLOCKS.namespace) is Outcome.CORRUPT
    tier.close()
    [survivor] = tier_on(medium).survivors()
    assert survivor.header.key == BLOCKS.key(1)


def test_a_failed_read_is_gone_for_its_record_only(medium):
    tier = tier_on(medium)
    places = BLOCKS.save(tier, range(5))
    bad = tier._regions.offset(places[3])
    medium.fails = lambda what, at, nbytes: what == "read" and at <= bad < at + nbytes
    outcomes = BLOCKS.load(tier, range(5), places)
    assert outcomes == [*[Outcome.OK] * 3, Outcome.GONE, Outcome.OK]
    assert tier.usage().failures == 1


def test_records_go_to_another_region_after_a_region_header_fails(medium):
    tier = tier_on(medium)
    start = tier._superblock.geometry.region_at(0)
    medium.fails = lambda what, at, nbytes: what == "write" and at == start
    _, outcomes = write(tier, range(2))
    assert outcomes == [Outcome.GONE] * 2
    places, outcomes = write(tier, range(2))
    assert outcomes == [Outcome.OK] * 2
    assert BLOCKS.load(tier, range(2), places) == [Outcome.OK] * 2


def test_a_failed_footer_causes_only_a_scan(medium):
    tier = tier_on(medium)
    end = tier._superblock.geometry.region_at(1)
    medium.fails = lambda what, at, nbytes: what == "write" and at + nbytes == end
    BLOCKS.save(tier, range(8))
    tier.close()
    medium.fails = None
    again = tier_on(medium)
    assert [s.header.key for s in again.survivors()] == [BLOCKS.key(n) for n in range(8)]


def test_a_snapshot_that_could_not_be_written_is_written_later(medium):
    tier = tier_on(medium)
    [first, _] = BLOCKS.save(tier, range(2))
    tier.close()
    tier = tier_on(medium)
    assert len(list(tier.survivors())) == 2
    tier.free([first])
    medium.fails = lambda what, at, nbytes: what == "write"
    tier._save_snapshot()
    medium.fails = None
    tier.close()
    assert [each.header.key for each in tier_on(medium).survivors()] == [BLOCKS.key(1)]


def test_a_medium_that_cannot_be_written_is_refused_at_start(medium):
    medium.fails = lambda what, at, nbytes: what == "write"
    with pytest.raises(ConfigError, match="cannot be written"):
        tier_on(medium)


def test_an_unexpected_error_frees_claimed_places(medium):
    tier = tier_on(medium)
    medium.write = lambda offset, views: 1 / 0
    with pytest.raises(ZeroDivisionError):
        write(tier, [0])
    del medium.write
    assert (tier.usage().records, tier.usage().used_bytes) == (0, 0)
    numbers = range(1, 40)
    for number in numbers:
        assert write(tier, [number])[1] == [Outcome.OK]


# Close.


def test_close_waits_for_writes_in_progress(medium):
    tier = tier_on(medium)
    entered, released, outcomes = threading.Event(), threading.Event(), []
    real = medium.write

    def slow_write(offset, views):
        entered.set()
        assert released.wait(30)
        real(offset, views)

    medium.write = slow_write
    writer = threading.Thread(target=lambda: outcomes.extend(write(tier, range(3))[1]))
    writer.start()
    assert entered.wait(30)
    closer = threading.Thread(target=tier.close)
    closer.start()
    closer.join(0.5)  # a close that does not wait ends within this time
    assert closer.is_alive()
    released.set()
    writer.join()
    closer.join()
    assert outcomes == [Outcome.OK] * 3
    again = tier_on(medium)
    assert len(list(again.survivors())) == 3


def test_close_writes_no_footer_for_a_region_with_unwritten_places(medium):
    tier = tier_on(medium)
    BLOCKS.save(tier, range(3))
    BLOCKS.reserve(tier)
    tier.close()
    end = tier._superblock.geometry.region_at(1)
    assert medium.image[end - SECTOR : end] == bytes(SECTOR)
    again = tier_on(medium)
    assert [s.header.key for s in again.survivors()] == [BLOCKS.key(n) for n in range(3)]
