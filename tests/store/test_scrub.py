"""Scrub: everything is read, at a pace, and what fails is forgotten and can be written again."""

import threading
import time

import pytest

from holdfast.errors import Outcome
from holdfast.status import ScrubStatus
from holdfast.store.scrub import Scrubber, ScrubRequest, scrub
from holdfast.testing.memory import MemoryTier, SharedMemoryTier
from holdfast.testing.store_control import leave

MIB = 1 << 20


def rot(records, number):
    """Change one byte of a record in a memory tier."""
    place = sorted(records)[number]
    records[place] = records[place][:200] + b"\0" + records[place][201:]


def test_verify_finds_a_bad_copy_and_keeps_the_good_one(harness) -> None:
    records = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    chain = one.chain(1, 3)
    one.save(chain)
    one.flush()
    rot(records, 1)
    found = one.store.verify()
    assert found["checked"] == 6
    assert [bad["tier"] for bad in found["bad"]] == ["memory"]
    assert one.read(chain) == 3
    assert one.store.verify()["bad"] == []


def test_a_scrub_continues_where_it_stopped(harness) -> None:
    one = harness()
    one.save(one.chain(1, 5))
    found = one.store.verify(ScrubRequest(seconds=0.0))
    assert (found["checked"], found["next"]) == (1, 1), "a step at least, or it would never end"
    found = one.store.verify(ScrubRequest(start=3))
    assert (found["checked"], found["next"]) == (2, -1)


def test_a_scrub_pass_ends_even_if_every_step_exceeds_its_time_limit(harness, monkeypatch) -> None:
    one = harness(MIB, MemoryTier(64 * MIB))
    chain = one.chain(1, 5)
    one.save(chain)
    one.flush()
    leave(one.store, one.namespace, chain.keys[2:3], 0, 1)
    now_s = one.clock.now

    def slow():
        one.clock.advance(2.0)
        return now_s()

    monkeypatch.setattr(one.clock, "now", slow)
    scrubber, steps = Scrubber(one.store, 100.0), []
    monkeypatch.setattr(
        scrubber, "_wait_for_fetches", lambda: steps.append(1) or len(steps) < 9 or 1 / 0
    )
    scrubber.run_pass()
    assert (scrubber.passes, scrubber.checked) == (1, 8)


def test_a_scrub_reads_no_faster_than_its_rate(harness, monkeypatch) -> None:
    one = harness()
    one.save(one.chain(1, 9))
    stop, waited = threading.Event(), []

    def wait(seconds):
        waited.append(seconds)
        one.clock.advance(seconds)

    monkeypatch.setattr(stop, "wait", wait)
    found = scrub(one.store, ScrubRequest(rate=one.namespace.slot_bytes // 2), stop)
    assert found["bytes"] == 9 * one.namespace.slot_bytes
    assert sum(waited) == pytest.approx(16)  # two seconds a record, none for the last


def test_a_scrub_step_ends_in_time_at_a_slow_rate_and_reports_the_time_it_owes(
    harness, monkeypatch
) -> None:
    one = harness()
    one.save(one.chain(1, 9))
    stop, begun = threading.Event(), one.clock.now()
    monkeypatch.setattr(stop, "wait", one.clock.advance)
    found = scrub(one.store, ScrubRequest(seconds=1.0, rate=one.namespace.slot_bytes // 100), stop)
    assert one.clock.now() - begun == pytest.approx(1.0)
    assert (found["checked"], found["next"]) == (1, 1)
    assert found["owes_s"] == pytest.approx(99.0, rel=0.01)


def test_the_rate_holds_from_step_to_step_of_a_pass(harness, monkeypatch) -> None:
    one = harness()
    one.save(one.chain(1, 9))
    scrubber = Scrubber(one.store, 1e6, one.namespace.slot_bytes)
    begun = one.clock.now()
    monkeypatch.setattr(scrubber._stop, "wait", one.clock.advance)
    scrubber.run_pass()
    assert scrubber.checked == 9
    assert one.clock.now() - begun == pytest.approx(8)  # a second a record, none for the last


def test_a_scrub_can_be_limited_to_one_fingerprint(harness) -> None:
    one = harness()
    one.save(one.chain(1, 2))
    assert one.store.verify(ScrubRequest("00" * 16))["checked"] == 0
    assert one.store.verify(ScrubRequest(one.namespace.fingerprint.hex()))["checked"] == 2


def test_the_background_scrub_reads_and_counts_all_copies(harness) -> None:
    records = {}
    one = harness(MIB, MemoryTier(64 * MIB, records))
    one.save(one.chain(1, 6))
    one.flush()
    rot(records, 1)
    scrubber = Scrubber(one.store, 1e6)
    scrubber.run_pass()
    assert scrubber.status() == ScrubStatus(
        passes=1, checked=12, bytes=12 * one.namespace.slot_bytes, corrupt=1
    )
    assert one.view.faults[-1].outcome is Outcome.CORRUPT
    scrubber.run_pass()
    assert (scrubber.passes, scrubber.corrupt) == (2, 1)


def test_a_copy_that_cannot_be_read_does_not_count_as_corrupt(harness, monkeypatch) -> None:
    one = harness(MIB, MemoryTier(64 * MIB))
    one.save(one.chain(1, 3))
    one.flush()
    monkeypatch.setattr(one.tier, "read", lambda batch: [Outcome.GONE] * len(batch))
    scrubber = Scrubber(one.store, 1e6)
    scrubber.run_pass()
    assert (scrubber.checked, scrubber.corrupt) == (6, 0)
    assert one.view.faults[-1].outcome is Outcome.GONE


def test_the_background_scrub_does_not_read_shared_tiers(harness) -> None:
    one = harness(MIB, SharedMemoryTier({}))
    one.save(one.chain(1, 3))
    one.flush()
    scrubber = Scrubber(one.store, 1e6)
    scrubber.run_pass()
    assert scrubber.checked == 3
    assert one.store.verify()["checked"] == 6


def test_the_scrub_rate_follows_from_the_bytes_held_and_the_period(harness) -> None:
    one = harness()
    assert Scrubber(one.store, 10.0).pace() == MIB
    one.save(one.chain(1, 100))
    held = one.store.status().tiers[0].used_bytes
    assert Scrubber(one.store, 0.1).pace() == pytest.approx(held / 0.08, rel=0.01)
    assert Scrubber(one.store, 0.1, 2 * MIB).pace() == 2 * MIB


def test_the_background_scrub_runs_only_if_configured_and_stops_with_the_store(harness) -> None:
    assert not harness().store.scrubber._thread.is_alive()
    one = harness(scrub_every_s=1e6)
    scrubber = one.store.scrubber
    assert scrubber._thread.is_alive()
    one.store.close()
    assert not scrubber._thread.is_alive()


def test_a_failed_scrub_pass_is_followed_by_another(harness, monkeypatch, caplog) -> None:
    one, failed = harness(MIB), threading.Event()
    scrubber = Scrubber(one.store, 0.01)

    def run_pass():
        if not failed.is_set():
            failed.set()
            raise OSError(12, "Cannot allocate memory")
        scrubber.passes += 1

    monkeypatch.setattr(scrubber, "run_pass", run_pass)
    scrubber.start()
    until = time.monotonic() + 60
    while not scrubber.passes:
        assert time.monotonic() < until, "nobody looks any more"
        time.sleep(0.01)
    scrubber.close()
    assert "a scrub ended early" in caplog.text
