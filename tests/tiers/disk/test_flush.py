"""Flushes of the disk tier: what was written before one that failed is never safe again."""

import contextlib
import threading

import pytest

from holdfast.errors import Outcome
from holdfast.testing.extents import BufferedExtents, tier_on
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.base import TierPut
from holdfast.tiers.disk.region import SECTOR

REGION_BYTES = 32 * SECTOR
BLOCKS = Blocks(5 * SECTOR - 144)
"""Six records of five sectors fit into a region."""


@pytest.fixture
def medium():
    return BufferedExtents.formatted(REGION_BYTES, 8)


@pytest.fixture
def tier(medium):
    one = tier_on(medium)
    yield one
    one.close()


def survivors(tier):
    """Return the places of the records of an earlier process, by key."""
    return {survivor.header.key: survivor.place for survivor in tier.survivors()}


def test_a_record_is_not_safe_after_a_later_flush_if_its_own_has_failed(tier, medium):
    places = BLOCKS.save(tier, range(3))
    medium.failing_flushes = 1
    assert tier.flush(places) == [False] * 3
    assert tier.flush(places) == [False] * 3
    assert BLOCKS.load(tier, range(3), places) == [Outcome.OK] * 3, "it can still be read"


def test_what_is_written_again_after_a_failed_flush_is_safe(tier, medium):
    medium.failing_flushes = 1
    assert tier.flush(BLOCKS.save(tier, range(3))) == [False] * 3
    places = BLOCKS.save(tier, range(3))
    assert tier.flush(places) == [True] * 3
    after = tier_on(medium.after_power_cut())
    found = survivors(after)
    assert BLOCKS.load(after, range(3), [found[BLOCKS.key(n)] for n in range(3)]) == (
        [Outcome.OK] * 3
    )
    after.close()


def test_records_that_were_safe_in_other_regions_stay_safe(tier, medium):
    before = BLOCKS.save(tier, range(6))
    assert tier.flush(before) == [True] * 6
    medium.failing_flushes = 1
    after = BLOCKS.save(tier, range(6, 9))
    assert tier.flush(after) == [False] * 3
    assert tier.flush([*before, *after]) == [True] * 6 + [False] * 3


def test_a_record_that_was_being_written_while_a_flush_failed_is_not_safe(tier, medium):
    writing, go_on = threading.Event(), threading.Event()

    def hold_the_record(what, _offset, nbytes):
        if what == "write" and nbytes >= 5 * SECTOR:
            writing.set()
            assert go_on.wait(120)
        return False

    [place] = BLOCKS.reserve(tier).places
    medium.fails = hold_the_record
    writer = threading.Thread(target=tier.write, args=([TierPut(place, BLOCKS.record(0))],))
    writer.start()
    try:
        assert writing.wait(60)
        medium.failing_flushes = 1
        assert tier.flush([place]) == [False]
    finally:
        go_on.set()
        writer.join()
    assert tier.flush([place]) == [False]


def test_a_flush_at_the_same_time_as_one_that_fails_makes_nothing_safe(tier, medium):
    """The kernel tells only one of them that writes have failed."""
    failing, go_on, answers = threading.Event(), threading.Event(), []
    places, real = BLOCKS.save(tier, range(3)), medium.flush

    def fail_once():
        medium.flush = real
        medium.failing_flushes = 1
        try:
            real()
        finally:
            failing.set()
            assert go_on.wait(120)

    medium.flush = fail_once
    threads = [threading.Thread(target=lambda: answers.append(tier.flush(places)))]
    threads[0].start()
    try:
        assert failing.wait(60)
        threads.append(threading.Thread(target=lambda: answers.append(tier.flush(places))))
        threads[1].start()
        threads[1].join(0.05)
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert answers == [[False] * 3] * 2


def test_a_failed_flush_counts_once_for_each_record_and_stops_writes_after_many(tier, medium):
    places = BLOCKS.save(tier, range(9))
    medium.failing_flushes = 1
    tier.flush(places[:3])
    assert (tier.usage().failures, tier.read_only) == (3, False)
    tier.flush(places)
    assert (tier.usage().failures, tier.read_only) == (3, False)
    medium.failing_flushes = 1
    tier.flush(places)
    assert (tier.usage().failures, tier.read_only) == (12, True)


def test_records_of_an_earlier_process_are_safe_once_they_were_read(tier, medium):
    BLOCKS.save(tier, range(9))
    tier.close()
    after = tier_on(medium)
    found = survivors(after)
    places = [found[BLOCKS.key(n)] for n in range(9)]
    assert after.flush(places) == [False] * 9
    assert after.verify_recovered(places, 60.0) == 9
    assert after.flush(places) == [True] * 9
    again = reads_during(medium, lambda: after.verify_recovered(places, 60.0))
    assert sum(nbytes for _, nbytes in again) == 0, "they are read once"
    after.close()


def test_a_few_records_of_an_earlier_process_are_one_call_of_the_drive(tier, medium):
    """A drive whose call takes 15 s counts as hanging, and a context may be gigabytes."""
    BLOCKS.save(tier, range(30))
    tier.close()
    after = tier_on(medium)
    found, calls, reads = survivors(after), [], []

    @contextlib.contextmanager
    def in_call():
        calls.append(0)
        yield
        reads.append(calls[-1])

    def note(what, _, __):
        calls[-1] += what == "read"
        return False

    medium.fails = note
    places = [found[BLOCKS.key(n)] for n in range(30)]
    assert after.verify_recovered(places, 60.0, in_call) == 30
    medium.fails = None
    assert sum(reads) == sum(calls) > 0
    assert max(reads) <= sum(reads) // 3
    assert after.flush(places) == [True] * 30
    after.close()


def test_a_record_that_a_footer_lists_and_a_power_cut_took_is_not_safe(tier, medium):
    places = BLOCKS.save(tier, range(12))
    assert tier.flush(places) == [True] * 12
    tier.close()
    medium.flush()
    cut = medium.after_power_cut()
    lost = tier._regions.offset(places[2]) + 2 * SECTOR  # no public way from a place to its bytes
    cut.image[lost : lost + SECTOR] = bytes(SECTOR)
    after = tier_on(cut)
    found = survivors(after)
    places = [found[BLOCKS.key(n)] for n in range(12)]
    assert after.verify_recovered(places, 60.0) == 12
    safe = after.flush(places)
    assert safe == [n != 2 for n in range(12)]
    after.close()


def reads_during(medium, work):
    """Return the reads of the medium during a call."""
    found = []

    def note(what, offset, nbytes):
        if what == "read":
            found.append((offset, nbytes))
        return False

    medium.fails = note
    work()
    medium.fails = None
    return found
