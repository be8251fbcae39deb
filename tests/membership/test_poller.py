"""A polled source tells no members once it is closed, however long its last round takes."""

import threading

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
