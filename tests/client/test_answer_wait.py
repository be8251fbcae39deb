"""How long a scheduling step waits for a node: pure decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.answer_wait import (
    IDLE_S,
    MAX_SKIPPED,
    STEP_MAX_S,
    STEP_SHARE,
    AnswerWait,
    budget_s,
)


@pytest.mark.parametrize(
    ("step_s", "computing", "expected_s"),
    [
        (0.0, False, IDLE_S),
        (0.0, True, 0.0),
        (0.01, True, STEP_SHARE * 0.01),
        (0.01, False, IDLE_S),
        (0.2, True, STEP_SHARE * 0.2),
        (0.2, False, STEP_SHARE * 0.2),
        (3.0, True, STEP_MAX_S),
        (3.0, False, STEP_MAX_S),
    ],
)
def test_a_step_waits_a_small_share_of_the_last_step(step_s, computing, expected_s):
    assert budget_s(step_s, computing=computing) == pytest.approx(expected_s)


@given(
    st.floats(0, 10),
    st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.booleans()), max_size=40),
)
def test_all_waits_of_a_step_stay_within_its_budget(step_s, waits):
    wait, spent_s = AnswerWait(), 0.0
    for new_step, share, answered in waits:
        if new_step:
            wait.next_step()
            spent_s = 0.0
        limit_s = wait.limit_s(step_s, computing=True)
        spent_s += share * limit_s
        wait.waited(share * limit_s, limit_s, answered=answered)
        assert spent_s <= budget_s(step_s, computing=True) + 1e-9


def vain_waits(wait, steps):
    """Let this many steps wait for a node that is silent; return the limits."""
    limits = []
    for _ in range(steps):
        wait.next_step()
        limits.append(limit_s := wait.limit_s(1.0, computing=True))
        if limit_s:
            wait.waited(limit_s, limit_s, answered=False)
    return limits


def test_no_step_waits_for_a_slow_node_until_it_answers_again():
    wait = AnswerWait()
    assert vain_waits(wait, 4) == [STEP_MAX_S, 0, 0, 0]
    assert wait.limit_s(1.0, computing=False) > 0, "an idle engine waits all the same"
    for skipped in (2, 4, 8, 16, 32, MAX_SKIPPED, MAX_SKIPPED):
        for _ in range(skipped - 1):
            wait.answered()
            assert wait.limit_s(1.0, computing=True) == 0
        wait.answered()
        assert vain_waits(wait, 2) == [STEP_MAX_S, 0]
    wait.next_step()
    wait.waited(0.001, IDLE_S, answered=True)
    assert wait.limit_s(1.0, computing=True) > 0


def test_a_failed_wait_in_a_short_step_does_not_stop_waits_in_long_steps():
    wait = AnswerWait()
    short_s = wait.limit_s(0.01, computing=True)
    wait.waited(short_s, short_s, answered=False)
    wait.next_step()
    assert wait.limit_s(0.01, computing=True) == 0
    assert wait.limit_s(0.2, computing=True) == pytest.approx(STEP_SHARE * 0.2)


def test_a_failed_wait_for_the_rest_of_a_budget_does_not_mark_a_node_slow():
    wait = AnswerWait()
    wait.waited(0.9 * STEP_MAX_S, STEP_MAX_S, answered=True)
    rest_s = wait.limit_s(1.0, computing=True)
    wait.waited(rest_s, rest_s, answered=False)
    wait.next_step()
    assert wait.limit_s(1.0, computing=True) == STEP_MAX_S
