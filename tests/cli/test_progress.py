"""The progress that a command shows of long work."""

import io

import pytest

from holdfast.cli import progress
from holdfast.cli.progress import WorkRate, duration_text, work_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `time.monotonic` returns, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("done", "total", "after", "rest_s"),
    [
        (range(2, 21, 2), 40, 40.0, 40.0),
        ([5, 10, 15, 20], 40, 40.0, None),  # too few steps
        ([*[0] * 9, 20], 40, 40.0, None),  # a slow start
        ([9, 12, 14, 16, 17, 18, 19, 19, 20, 20], 40, 40.0, None),  # slower and slower
        (range(2, 21, 2), 20, 40.0, None),
        (range(2, 21, 2), 0, 40.0, None),
        ([0] * 10, 40, 40.0, None),
    ],
)
def test_the_remaining_time_is_estimated_only_at_a_steady_rate(done, total, after, rest_s):
    rate = WorkRate()
    for number, each in enumerate(done, 1):
        rate.note(each, after * number / len(done))
    assert rate.remaining_s(done[-1], total, after) == rest_s


def test_the_samples_of_long_work_are_bounded():
    rate = WorkRate()
    for second in range(1, 100_001):
        rate.note(second, second)
    assert rate.remaining_s(100_000, 150_000, 100_000) == 50_000
    assert len(rate._samples) <= 256


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (61, "1 min 1 s"), (5_940, "1 h 39 min")]
)
def test_a_duration_has_two_units_at_most(seconds, text):
    assert duration_text(seconds) == text


def test_no_remaining_time_is_shown_for_steps_of_unequal_length(monkeypatch, clock):
    err = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", err)
    with work_progress("steps", "this part") as show:
        for done, took_s in enumerate([30, 2, 2, 2, 60, 30], 1):
            clock[0] += took_s
            show(done, 8, "now")
    assert "left" not in err.getvalue()


def test_a_pipe_gets_a_line_every_ten_seconds_and_none_for_short_work(monkeypatch, clock):
    err = io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", err)
    with work_progress("requests") as show:
        for done in range(25):
            clock[0] += 1
            show(done, 50, "now")
    assert err.getvalue().splitlines() == [
        "9 of 50 requests, now: 10 s elapsed, about 46 s left",
        "19 of 50 requests, now: 20 s elapsed, about 33 s left",
    ]


def test_a_terminal_has_one_line_which_is_removed_at_the_end(monkeypatch, clock):
    err = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", err)
    with work_progress("copies") as show:
        show(1, 0, "too early")
        clock[0] += 1
        show(2, 0, "1 MiB")
    assert "too early" not in err.getvalue()
    assert err.getvalue().endswith("2 copies, 1 MiB: 1 s elapsed\r\x1b[K")
    assert "\n" not in err.getvalue()
