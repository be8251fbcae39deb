"""What submission costs: batches in one call and in many, and calls that give up Python's lock."""

import pytest

pytest.importorskip("torch")

from holdfast_bench.measure.gpu import submission
from holdfast_bench.measure.gpu.accelerator import EagerDriver
from holdfast_bench.measure.gpu.submission import CountedDriver


def test_hand_overs_and_both_kinds_of_batches_are_measured(measured):
    found = measured(submission)
    assert list(found) == [
        "gpu.save.handovers",
        "gpu.load.handovers",
        *[
            f"gpu.submit.call.{name}"
            for name in ("engine_stream", "new_event", "event_again", "record", "query", "launch")
        ],
        *[
            f"gpu.submit.{size}.{way}"
            for size in ("8x4KiB", "16x1KiB")
            for way in ("batch", "loop")
        ],
    ]
    # A save makes no call that waits, and a load waits once, for its end.
    assert (found["gpu.save.handovers"].value, found["gpu.save.handovers"].ok) == (0, True)
    assert (found["gpu.load.handovers"].value, found["gpu.load.handovers"].ok) == (1, True)
    assert found["gpu.submit.8x4KiB.loop"].more["us_of_the_call"] > 0


def test_batches_for_which_no_time_is_left_are_named(measured):
    found = measured(submission, until_s=0.0)
    assert found["gpu.submit.16x1KiB.loop"].more == {"why": "no time was left"}


def test_only_calls_that_wait_count_as_hand_overs():
    driver = CountedDriver(EagerDriver())
    event, stream = driver.create_event(), driver.create_stream(urgent=False)
    driver.record(event, stream)
    driver.query(event)
    assert driver.waiting_calls == 0
    driver.synchronise(event)
    assert driver.waiting_calls == 1
    driver.close()
