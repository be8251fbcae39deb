"""A polled source tells no members once it is closed, however long its last round takes."""

import threading

import pytest

from holdfast.membership import poller
from holdfast.membership.poller import PolledSource
from holdfast.testing.membership_contract import ReportedViews


class Late(PolledSource):
    """Reads its list until a test lets it go on."""

    def __init__(self):
        super().__init__("late", 0.01, 0.01)
        self.begun, self.resumed, self.ended = (threading.Event() for _ in range(3))

    def _one_round(self):
        self.begun.set()
        self.resumed.wait(60)
        self._tell(())
        self.ended.set()


def test_a_round_that_ends_after_close_reports_nothing(monkeypatch):
    monkeypatch.setattr(poller, "_JOIN_S", 0.0)
    source, heard = Late(), ReportedViews()
    source.watch(heard)
    assert source.begun.wait(60)
    source.close()
    source.resumed.set()
    assert source.ended.wait(60)
    assert heard.lists == []


def test_a_listener_may_close_its_source():
    source = Late()
    source.resumed.set()
    source.watch(lambda _: source.close())
    assert source.ended.wait(60)
    assert source.closing.is_set()


class Failing(PolledSource):
    """Its rounds end in an error; a test waits for the second."""

    def __init__(self, error):
        super().__init__("failing", 0.01, 0.01)
        self._error, self._rounds, self.seen = error, 0, threading.Event()

    def _one_round(self):
        self._rounds += 1
        if self._rounds > 2:
            self.seen.set()
        raise self._error


@pytest.mark.parametrize(
    ("error", "trouble", "lines"),
    [(OSError("no route"), "no route", 1), (KeyError("members"), "KeyError('members')", 2)],
)
def test_an_unexpected_error_of_a_round_is_named_and_logged_once_with_its_place(
    error, trouble, lines, caplog
):
    source = Failing(error)
    source.watch(lambda _: None)
    assert source.seen.wait(60)
    assert source.trouble() == trouble
    source.close()
    assert len(caplog.records) == lines
    assert ("in _one_round" in caplog.text) is (lines == 2)
