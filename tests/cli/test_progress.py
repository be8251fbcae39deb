"""The progress that a command shows of long work."""

import io

import pytest

from holdfast.cli import progress
from holdfast.cli.progress import remaining_text, work_progress


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
    ("done", "total", "elapsed_s", "text"),
    [
        (0, 10, 3.0, "3 s elapsed"),
        (5, 0, 61.0, "1 min 1 s elapsed"),
        (5, 10, 40.0, "40 s elapsed, about 40 s left"),
        (1, 100, 60.0, "1 min 0 s elapsed, about 1 h 39 min left"),
        (10, 10, 7.0, "7 s elapsed"),
    ],
)
def test_the_rest_is_in_proportion_to_what_is_done(done, total, elapsed_s, text):
    assert remaining_text(done, total, elapsed_s) == text


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
