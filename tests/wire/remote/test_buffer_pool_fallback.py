"""When records leave the road to a target, and when they come back to it."""

import pytest

from holdfast.wire.remote import buffer_pool as window_module
from holdfast.wire.remote.buffer_pool import FALLBACK_S, BufferFallback


class FakeRoad:
    """A road whose window is there, or not yet."""

    def __init__(self):
        self.made = None

    def buffer_pool(self):
        return self.made


@pytest.fixture
def now(monkeypatch):
    """The time, in a list."""
    seconds = [1000.0]
    monkeypatch.setattr(window_module.time, "monotonic", lambda: seconds[0])
    return seconds


def test_without_a_road_there_is_no_window_and_no_reason_to_connect_anew(now):
    fallback = BufferFallback(None)
    now[0] += 10 * FALLBACK_S
    assert fallback.buffer_pool() is None
    assert not fallback.is_over(made_s=0.0)


def test_a_connection_made_before_the_window_was_there_is_made_anew_after_a_while(now):
    transfer_buffers = FakeRoad()
    fallback = BufferFallback(transfer_buffers)
    made_s = now[0]
    assert fallback.buffer_pool() is None
    transfer_buffers.made = "window"
    assert not fallback.is_over(made_s), "not at once: the far side may not have it either"
    now[0] += FALLBACK_S
    assert fallback.is_over(made_s)
    assert fallback.buffer_pool() == "window"


def test_after_a_call_that_failed_the_road_is_left_for_a_while(now):
    transfer_buffers = FakeRoad()
    transfer_buffers.made = "window"
    fallback = BufferFallback(transfer_buffers)
    fallback.begin()
    assert fallback.buffer_pool() is None
    assert not fallback.is_over(made_s=0.0)
    now[0] += FALLBACK_S
    assert fallback.buffer_pool() == "window"
