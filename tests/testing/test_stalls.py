"""A call is late through no fault of its own only while a processor stood still."""

import os
import threading
import time

import pytest

from holdfast.testing.stalls import LATE_S, StallWatch
from holdfast_bench.campaigns import chaos_pool
from holdfast_bench.campaigns.campaign import CampaignResult
from holdfast_bench.campaigns.chaos_pool import SLACK_S, ChaosUsers
from holdfast_bench.harness.pause import pause, resume


def stand_still(watch, seconds, processors=None):
    """Pause the watch alone, to which it looks like a stall."""
    processes = watch._processes[:processors]
    for process in processes:
        pause(process.pid)
    begun_s = time.monotonic()
    time.sleep(seconds)
    for process in processes:
        resume(process.pid)
    return begun_s, time.monotonic()


@pytest.mark.parametrize("processors", [1, None])
def test_a_stall_watch_measures_processor_stalls_within_an_interval(stalls, processors):
    begun_s, ended_s = stand_still(stalls, 0.8, processors)
    stood_s = stalls.within(begun_s, ended_s + 0.2)
    assert 0.6 <= stood_s <= 1.0 + (ended_s - begun_s - 0.8)
    assert stalls.within(begun_s + 0.4, begun_s + 0.5) == pytest.approx(0.1)
    assert stalls.within(begun_s - 9.0, begun_s - 8.0) == 0.0


def test_a_stall_that_has_just_ended_is_counted(stalls):
    process = stalls._processes[0]
    pause(process.pid)
    begun_s = time.monotonic()
    going_on = threading.Timer(1.0, resume, [process.pid])
    going_on.start()
    time.sleep(0.6)
    assert stalls.within(begun_s, begun_s + 0.6) >= 0.5
    going_on.join()


def test_elapsed_time_is_reported_without_processor_stalls(stalls):
    begun_s, _ = stand_still(stalls, 0.8)
    time.sleep(0.3)
    told_s = stalls.since(begun_s)
    assert time.monotonic() - begun_s - told_s >= 0.6


def test_each_processor_is_watched(stalls):
    def looked_at():
        return [os.sched_getaffinity(process.pid) for process in stalls._processes]

    assert looked_at() == [{processor} for processor in sorted(os.sched_getaffinity(0))]


def test_a_process_that_blocks_its_own_threads_does_not_count_as_a_stall(stalls):
    def stood_s():
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + 2 * LATE_S:
            sum(range(100_000))
        return stalls.within(begun_s, time.monotonic())

    assert 0.0 in (stood_s() for _ in range(10))  # the machine's own are none of its doing


def test_closing_a_stall_watch_ends_its_processes():
    watch = StallWatch()
    watch.close()
    for process in watch._processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


class Pool:
    """No pool, but a watch."""

    def __init__(self, watch):
        self.stalls = watch


def timed(watch, call, monkeypatch):
    monkeypatch.setattr(chaos_pool, "USERS", 0)
    calls = CampaignResult("calls", "calls")
    ChaosUsers(Pool(watch), calls, CampaignResult("blocks", "blocks"), 1)._timed("read", 0.0, call)
    return calls


def test_a_late_call_is_a_failure_unless_a_processor_stalled(stalls, monkeypatch):
    def failures():
        late = timed(stalls, lambda: time.sleep(SLACK_S + 0.5), monkeypatch)
        return [each[:11] for each in late.failures]

    assert ["a read took"] in (failures() for _ in range(5))  # a processor may stand still indeed
    calls = (
        timed(stalls, lambda: stand_still(stalls, SLACK_S + 0.1), monkeypatch) for _ in range(5)
    )
    stood = next((each for each in calls if not each.failures), None)
    assert stood is not None
    assert stood.counts["late because of a stall"] == 1
