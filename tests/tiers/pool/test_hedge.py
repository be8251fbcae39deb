"""Hedges stay within their budget, and lateness is measured by what is usual."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.tiers.pool.hedged_read import HEDGES_SAVED_MAX, HedgeBudget
from holdfast.tiers.pool.target_statistics import SAMPLES_MAX, HedgeDelays


@given(st.lists(st.booleans(), max_size=2_000), st.integers(1, 20))
def test_the_budget_is_never_exceeded_at_any_moment(asks, percent):
    budget, taken = HedgeBudget(percent), 0
    for is_hedge in asks:
        if is_hedge:
            taken += budget.take()
        else:
            budget.request()
        assert 100 * budget.hedges <= percent * budget.requests
    assert budget.hedges == taken


def test_the_budget_is_used_when_everything_is_late():
    budget = HedgeBudget()
    for _ in range(10_000):
        budget.request()
        budget.take()
    assert budget.hedges == 500


def test_requests_without_hedges_save_up_a_bounded_number_of_hedges():
    budget = HedgeBudget()
    for _ in range(1_000_000 // 100):
        budget.request()
    taken = 0
    while budget.take():
        taken += 1
    assert taken == HEDGES_SAVED_MAX


def test_threads_share_one_budget():
    budget = HedgeBudget()

    def ask():
        for _ in range(2_000):
            budget.request()
            budget.take()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.requests == 8_000
    assert budget.hedges == 400


def test_the_hedge_delay_is_unknown_until_there_are_enough_samples():
    delays = HedgeDelays()
    for _ in range(19):
        delays.record(0.001)
    assert delays.late_s is None
    delays.record(0.001)
    assert delays.late_s == 0.001


def test_the_hedge_delay_is_the_95th_percentile_of_the_last_answers():
    delays = HedgeDelays()
    for number in range(1_000):
        delays.record(number / 1_000)
    first = 1_000 - SAMPLES_MAX
    assert delays.late_s == pytest.approx((first + int(0.95 * SAMPLES_MAX)) / 1_000)
