"""The steps that a measuring command shows."""

import io

import pytest
from rich.console import Console

from holdfast_bench.cli import progress as steps_of_bench
from holdfast_bench.cli.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """The seconds that `time.monotonic` returns, in a list of one."""
    now = [50.0]
    monkeypatch.setattr(steps_of_bench.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_a_line_for_each_step_with_its_number_and_no_expected_end(capsys, clock):
    with progress(Console(file=io.StringIO()), "set-up") as steps:
        clock[0] += 5
        steps.plan(3)
        for name in ("one", "two", "three"):
            steps.begin(name)
            clock[0] += 10
        steps.advance()
        steps.update("the end")
    assert capsys.readouterr().err.splitlines() == [
        "     0 s  set-up",
        "     5 s  step 1 of 3: one",
        "    15 s  step 2 of 3: two",
        "    25 s  step 3 of 3: three",
        "    35 s  the end",
    ]


def test_a_part_of_a_step_is_shown_but_not_counted(capsys, clock):
    with progress(Console(file=io.StringIO()), "set-up") as steps:
        steps.plan(2)
        steps.begin("one")
        clock[0] += 1
        steps.update("a part [of] one")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "     1 s  step 1 of 2: a part [of] one"


def test_a_terminal_shows_the_step_and_the_present_time_in_one_status_line(clock):
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress(console, "set-up") as steps:
        steps.plan(2)
        steps.begin("one [bold]")
        shown = steps._status.status
        for after_s, so_far in ((0, "0 s"), (500, "8 min 20 s")):
            clock[0] += after_s
            line = console.render_str(str(shown.__rich__()), markup=False).plain
            assert line == f"step 1 of 2, {so_far} so far: one [bold]"
