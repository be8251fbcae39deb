"""The first planner fetches what is held and fits the deadline."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.world import World
from holdfast.index.residency import Coverage
from holdfast.plan.planner import FetchHeld, Speed

WORLD = World(b"f" * 16, b"d" * 16, 2 << 20, 128)
SPEEDS = [Speed(0.0, 8e9), Speed(1e-3, 2e9)]


def held(tiers: list[int]) -> Coverage:
    return Coverage(WORLD, list(range(len(tiers))), tiers)


def test_fetches_everything_when_there_is_time() -> None:
    plan = FetchHeld().plan(held([0, 0, 1, 1]), 1.0, SPEEDS)
    assert plan.blocks == 4
    assert plan.reason.startswith("fetch all 4 blocks")


def test_stops_where_the_deadline_would_pass() -> None:
    plan = FetchHeld().plan(held([1] * 100), 0.01, SPEEDS)
    assert 0 < plan.blocks < 100
    assert plan.expected_s <= 0.01
    assert "deadline" in plan.reason


@given(
    st.lists(st.integers(0, 1), max_size=50),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_more_time_never_fetches_less(tiers: list[int], less: float, more: float) -> None:
    less, more = sorted((less, more))
    planner = FetchHeld()
    a = planner.plan(held(tiers), less, SPEEDS)
    b = planner.plan(held(tiers), more, SPEEDS)
    assert a.blocks <= b.blocks <= len(tiers)
    assert a.expected_s <= less
