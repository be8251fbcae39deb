"""When records leave the road to a target, and when they come back to it."""

import pytest

from holdfast.wire import window as window_module
from holdfast.wire.window import DETOUR_S, Detour


class FakeRoad:
    """A road whose window is there, or not yet."""

    def __init__(self):
        self.made = None

    def window(self):
        return self.made


@pytest.fixture
def now(monkeypatch):
    """The time, in a list."""
    seconds = [1000.0]
    monkeypatch.setattr(window_module.time, "monotonic", lambda: seconds[0])
    return seconds


def test_without_a_road_there_is_no_window_and_no_reason_to_connect_anew(now):
    detour = Detour(None)
    now[0] += 10 * DETOUR_S
    assert detour.window() is None
    assert not detour.is_over(made_s=0.0)


def test_a_connection_made_before_the_window_was_there_is_made_anew_after_a_while(now):
    road = FakeRoad()
    detour = Detour(road)
    made_s = now[0]
    assert detour.window() is None
    road.made = "window"
    assert not detour.is_over(made_s), "not at once: the far side may not have it either"
    now[0] += DETOUR_S
    assert detour.is_over(made_s)
    assert detour.window() == "window"


def test_after_a_call_that_failed_the_road_is_left_for_a_while(now):
    road = FakeRoad()
    road.made = "window"
    detour = Detour(road)
    detour.begin()
    assert detour.window() is None
    assert not detour.is_over(made_s=0.0)
    now[0] += DETOUR_S
    assert detour.window() == "window"
