"""When to begin bringing contexts up, and which of them first."""

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.prestage import (
    IN_TIME,
    LATE_S,
    PrestageTimes,
    advance_turns,
    begin_in_s,
    in_order,
)

SECONDS = st.floats(0, 1e6)
NOW_S = 100.0


@given(SECONDS, SECONDS)
def test_a_prestage_begins_early_enough_or_at_once(needed_in_s: float, fetch_s: float) -> None:
    begin = begin_in_s(needed_in_s, fetch_s)
    assert begin == 0 or begin + fetch_s < needed_in_s


def test_a_longer_prestage_begins_sooner() -> None:
    assert begin_in_s(60.0, 1.0) == 57.5
    assert begin_in_s(60.0, 10.0) < begin_in_s(60.0, 1.0)


def due(**in_s: tuple[float, float]) -> dict[str, PrestageTimes]:
    """Prestages by name: needed in this time, and read in this time."""
    return {
        name: PrestageTimes(NOW_S + left_s, fetch_s) for name, (left_s, fetch_s) in in_s.items()
    }


def test_what_arrives_in_time_is_read_first_and_the_soonest_needed_of_it() -> None:
    waiting = due(late=(1.0, 2.0), later=(9.0, 2.0), sooner=(4.0, 2.0), small=(2.0, 0.1))
    assert in_order(waiting, NOW_S) == ["small", "sooner", "later", "late"]


def test_of_what_is_too_late_the_one_with_most_time_is_first_and_an_unknown_time_is_last() -> None:
    waiting = due(unknown=(0.0, 2.0), soon=(0.5, 2.0), over=(-1.0, 2.0), nearly=(2.5, 2.0))
    assert in_order(waiting, NOW_S) == ["nearly", "soon", "unknown", "over"]


def test_a_prestage_is_dropped_long_after_it_was_needed() -> None:
    waiting = due(over=(-LATE_S, 0.0), late=(0.1 - LATE_S, 0.0))
    assert in_order(waiting, NOW_S) == ["late"]


@given(st.floats(1, 1e4), st.floats(0, 1e4))
def test_a_prestage_that_begins_as_planned_is_in_time(needed_in_s: float, fetch_s: float) -> None:
    begin_s = begin_in_s(needed_in_s, fetch_s)
    assert begin_s == 0 or needed_in_s - begin_s >= IN_TIME * fetch_s


def test_a_context_that_is_read_lets_the_requests_behind_it_have_their_turn_sooner() -> None:
    taken = PrestageTimes(NOW_S + 4, 1.0, 1, "engine", 3.0)
    waiting = {
        "before": taken._replace(needed_s=NOW_S + 2),
        "behind": taken._replace(needed_s=NOW_S + 9),
        "close behind": taken._replace(needed_s=NOW_S + 5),
        "elsewhere": taken._replace(needed_s=NOW_S + 9, engine="another"),
        "nobody's": PrestageTimes(NOW_S + 9, 1.0),
    }
    sooner = {name: times.needed_s for name, times in advance_turns(waiting, taken).items()}
    assert sooner == {"behind": NOW_S + 6, "close behind": NOW_S + 4}
    assert advance_turns(waiting, PrestageTimes(NOW_S, math.inf)) == {}
