"""A report is made once for all who wait for it, and never before it was asked for."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.node.paced_report import PacedReport

CALLERS = 7


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_callers_that_wait_together_get_one_report_that_began_after_they_asked():
    begun, go_on, made = threading.Event(), threading.Event(), []

    def make():
        made.append(len(made))
        begun.set()
        assert go_on.wait(60)
        return made[-1]

    report = PacedReport(make, rest=0.5)
    with ThreadPoolExecutor(1 + CALLERS) as threads:
        first = threads.submit(report.read)
        assert begun.wait(60)
        others = [threads.submit(report.read) for _ in range(CALLERS)]
        until(lambda: report.waiting == CALLERS)
        go_on.set()
        assert first.result(60) == 0
        assert [other.result(60) for other in others] == [1] * CALLERS
    assert (made, report.waiting) == ([0, 1], 0)
    assert report.read() == 2


def test_a_report_that_fails_is_made_again_for_the_next_caller():
    answers = iter([OSError("no"), "yes"])

    def make():
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    report = PacedReport(make, rest=0.0)
    with pytest.raises(OSError, match="no"):
        report.read()
    assert report.read() == "yes"
