"""When to begin bringing a context up: early enough, and never in the past."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.prestage import begin_in_s

SECONDS = st.floats(0, 1e6)


@given(SECONDS, SECONDS)
def test_a_prestage_begins_early_enough_or_at_once(needed_in_s: float, fetch_s: float) -> None:
    begin = begin_in_s(needed_in_s, fetch_s)
    assert begin == 0 or begin + fetch_s < needed_in_s


def test_a_longer_prestage_begins_sooner() -> None:
    assert begin_in_s(60.0, 1.0) == 57.5
    assert begin_in_s(60.0, 10.0) < begin_in_s(60.0, 1.0)
