"""Slots are filled only soon after they were requested: later they may be those of other blocks."""

import pytest

from holdfast.client.fresh_slots import reserve_slots
from holdfast.errors import NodeGoneError
from holdfast.limits import FILL_S, RECLAIM_S
from holdfast.wire.local.messages import Abort, Reserve, Reserved

REQUEST = Reserve(b"k" * 16, b"p" * 16, 0)


class StallingClient:
    """A session whose caller stalls after each answer; `stalls_s` has one entry for each."""

    def __init__(self, *stalls_s):
        self.now_s = 0.0
        self.sent = []
        self.forgotten = []
        self._stalls_s = list(stalls_s)
        self._tickets = 0

    def call(self, message, kind, timeout_s):
        assert (message, kind, timeout_s) == (REQUEST, Reserved, 30.0)
        self._tickets += 1
        self.now_s += self._stalls_s.pop(0)
        return Reserved(self._tickets, [0], "ok")

    def send(self, message):
        self.sent.append(message)
        return len(self.sent)

    def forget(self, request_id):
        self.forgotten.append(request_id)

    def reserve(self):
        return reserve_slots(self, REQUEST, 30.0, lambda: self.now_s)


def test_slots_that_were_just_reserved_are_used():
    client = StallingClient(FILL_S)
    assert client.reserve().ticket == 1
    assert client.sent == []


def test_slots_reserved_before_a_stall_are_returned_and_reserved_again():
    client = StallingClient(RECLAIM_S + 1, 0.1)
    assert client.reserve().ticket == 2
    assert client.sent == [Abort(1)]
    assert client.forgotten == [1]


def test_a_caller_that_stalls_again_and_again_fills_no_slot():
    client = StallingClient(FILL_S + 1, FILL_S + 2)
    with pytest.raises(NodeGoneError, match=r"reserved 7\.0 s before .* the limit is 5 s"):
        client.reserve()
    assert client.sent == [Abort(1), Abort(2)]
