"""Writes stop after many failures and resume by themselves, with two log lines in all."""

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.testing.extents import MemoryExtents, tier_on
from holdfast.testing.tier_contract import Blocks
from holdfast.tiers.base import NOWHERE, TierPut, takes_writes
from holdfast.tiers.disk.region import SECTOR
from holdfast.tiers.disk.write_stop import FAILURES_MAX, FAILURES_WITHIN_S, PAUSE_MAX_S, PAUSE_S
from holdfast.tiers.reported import tier_status

BLOCKS = Blocks(5 * SECTOR - 144)


class Disk:
    """A disk tier with a medium and a clock that a test controls."""

    def __init__(self):
        self.clock, self.medium = ManualClock(), MemoryExtents.formatted(32 * SECTOR, 4)
        self.tier = tier_on(self.medium, self.clock)

    def fail(self, kind):
        """Fail every "read" or "write" from now on; neither for ""."""
        self.medium.fails = lambda what, at, nbytes: what == kind

    def write(self, number):
        """Write one block; return its outcome, or FULL if the tier has no place for it."""
        place = BLOCKS.reserve(self.tier).places[0]
        if place == NOWHERE:
            return Outcome.FULL
        (outcome,) = self.tier.write([TierPut(place, BLOCKS.record(number))])
        return outcome

    def stop(self):
        self.fail("write")
        assert self.write(9) is Outcome.GONE
        while not self.stopped():
            assert self.write(9) is Outcome.GONE

    def stopped(self):
        return tier_status(self.tier).writes_stopped


@pytest.fixture
def disk():
    return Disk()


def test_many_failed_writes_stop_writes_and_reads_continue(disk):
    places = BLOCKS.save(disk.tier, range(3))
    waiting = BLOCKS.reserve(disk.tier).places[0]
    disk.stop()
    assert disk.stopped() == "0 s ago: [Errno 5] injected; tried again in 1 s"
    assert not takes_writes(disk.tier)
    assert disk.tier.write([TierPut(waiting, BLOCKS.record(5))]) == [Outcome.FULL]
    assert disk.write(6) is Outcome.FULL
    assert BLOCKS.load(disk.tier, range(3), places) == [Outcome.OK] * 3


def test_writes_resume_when_one_succeeds_after_a_pause(disk, caplog):
    disk.stop()
    disk.fail("")
    assert disk.write(1) is Outcome.FULL, "the pause is not over"
    disk.clock.advance(PAUSE_S)
    assert takes_writes(disk.tier)
    assert disk.stopped().endswith("tried again with the next block")
    assert disk.write(1) is Outcome.OK
    assert not disk.stopped()
    assert [disk.write(number) for number in range(2, 9)] == [Outcome.OK] * 7
    levels = [record.levelname for record in caplog.records if "writes" in record.message]
    assert levels == ["ERROR", "WARNING"]


def test_attempts_during_a_stop_come_at_growing_pauses_and_are_not_logged(disk, caplog):
    disk.stop()
    lines = len(caplog.records)
    assert lines == 2, "the first failure, and the stop"
    pauses, pause_s = [], 0.0
    while len(pauses) < 9:
        disk.clock.advance(0.5)
        pause_s += 0.5
        if disk.write(9) is not Outcome.FULL:
            pauses.append(pause_s)
            pause_s = 0.0
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert len(caplog.records) == lines


def test_a_medium_that_fails_again_soon_is_tried_less_often(disk):
    for expected in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S):
        disk.stop()
        disk.fail("")
        disk.clock.advance(expected - 0.1)
        assert disk.write(1) is Outcome.FULL
        disk.clock.advance(0.1)
        assert disk.write(1) is Outcome.OK
    disk.clock.advance(FAILURES_WITHIN_S + 1)
    disk.stop()
    disk.fail("")
    disk.clock.advance(PAUSE_S)
    assert disk.write(1) is Outcome.OK


def test_failures_far_apart_do_not_add_up(disk):
    disk.fail("write")
    for _ in range(3 * FAILURES_MAX):
        disk.write(9)
        disk.clock.advance(FAILURES_WITHIN_S / (FAILURES_MAX - 2))
        assert not disk.stopped()


def test_failed_reads_do_not_stop_writes_and_are_logged_once_a_minute(disk, caplog):
    places = BLOCKS.save(disk.tier, range(3))
    disk.fail("read")
    for _ in range(2 * FAILURES_MAX):
        assert BLOCKS.load(disk.tier, range(3), places) == [Outcome.GONE] * 3
    assert disk.tier.usage().failures == 6 * FAILURES_MAX
    assert not disk.stopped()
    assert disk.write(5) is Outcome.OK
    assert [record.message for record in caplog.records] == [
        "tier disk: 3 records failed: [Errno 5] injected"
    ]


def test_a_stopped_disk_closes_and_its_blocks_are_found_again(disk):
    BLOCKS.save(disk.tier, range(3))
    disk.stop()
    disk.tier.close()
    disk.fail("")
    assert len(list(tier_on(disk.medium).survivors())) == 3
    assert PAUSE_MAX_S <= 60, "writes resume within a minute of the end of a fault"
