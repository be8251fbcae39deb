"""The planner's cut is the best there is under its own model, and says why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.plan.cost import PrefillCost, TierEstimate
from holdfast.plan.planner import (
    BestCut,
    FetchHeld,
    Plan,
    PlanQuestion,
    expected_s,
    fetch_s,
    first_token_s,
)

NAMES = ("host", "disk", "pool", "object")
TIMES = st.floats(0, 0.1)
SPEEDS = st.one_of(st.just(0.0), st.floats(1e6, 1e11))
ESTIMATES = st.builds(TierEstimate, TIMES, SPEEDS, st.floats(0, 1e9))
ENDLESS = st.just(math.inf)
COSTS = st.builds(PrefillCost, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-7))


@st.composite
def questions(draw, limits=ENDLESS):
    tiers = draw(st.lists(st.integers(0, 3), max_size=24))
    block_tokens = draw(st.sampled_from([1, 16, 128]))
    prompt = max(1, len(tiers) * block_tokens + draw(st.integers(0, 3 * block_tokens)))
    return PlanQuestion(
        tiers=tiers,
        block_bytes=draw(st.integers(1, 1 << 23)),
        block_tokens=block_tokens,
        estimates=draw(st.lists(ESTIMATES, min_size=4, max_size=4)),
        names=NAMES,
        limit_s=draw(limits),
        cost=draw(COSTS),
        prompt_tokens=prompt,
        have_tokens=draw(st.integers(0, prompt - 1)),
        delivery=draw(ESTIMATES),
        queued_s=draw(st.one_of(st.just(0.0), st.floats(0, 10))),
    )


def allowed(question: PlanQuestion) -> list[int]:
    """Every cut within the limit, the empty one first."""
    last = len(question.tiers)
    cuts = range(question.first + 1, last + 1)
    return [question.first, *(k for k in cuts if fetch_s(question, k) <= question.limit_s)]


@given(questions(st.one_of(ENDLESS, st.floats(0, 1))))
def test_the_plan_is_the_fastest_of_all_allowed_cuts(question):
    plan = BestCut().plan(question)
    best = min(first_token_s(question, k) for k in allowed(question))
    assert plan.blocks in allowed(question)
    assert plan.expected_s == expected_s(question, plan.blocks)
    assert first_token_s(question, plan.blocks) == pytest.approx(best, rel=1e-6, abs=1e-9)


@given(questions())
def test_a_plan_is_never_slower_than_fetching_all_or_nothing(question):
    plan = BestCut().plan(question)
    tiny = 1e-6 * (plan.recompute_s + question.queued_s) + 1e-9
    planned_s = first_token_s(question, plan.blocks)
    assert planned_s <= first_token_s(question, question.first) + tiny
    assert planned_s <= first_token_s(question, len(question.tiers)) + tiny
    assert plan.recompute_s == pytest.approx(expected_s(question, question.first))


def with_tier(question: PlanQuestion, tier: int, **changes: float) -> PlanQuestion:
    estimates = list(question.estimates)
    estimates[tier] = estimates[tier]._replace(**changes)
    return question._replace(estimates=estimates)


@given(questions(), st.integers(0, 3), st.floats(1, 100))
def test_more_bandwidth_never_makes_a_plan_slower(question, tier, times):
    faster = with_tier(question, tier, bytes_per_s=question.estimates[tier].bytes_per_s * times)
    before, after = (first_token_s(q, BestCut().plan(q).blocks) for q in (question, faster))
    assert after <= before * (1 + 1e-9) + 1e-9


@given(questions(), st.integers(0, 3), st.floats(0, 1e10))
def test_a_longer_queue_never_makes_a_plan_faster(question, tier, more):
    queued = question.estimates[tier].queued_bytes + more
    busier = with_tier(question, tier, queued_bytes=queued)
    before, after = (first_token_s(q, BestCut().plan(q).blocks) for q in (question, busier))
    assert after >= before * (1 - 1e-9) - 1e-9


@given(questions(), st.floats(0, 10))
def test_a_longer_queue_at_the_engine_never_fetches_less(question, more_s):
    longer = question._replace(queued_s=question.queued_s + more_s)
    before, after = BestCut().plan(question), BestCut().plan(longer)
    if after.blocks < before.blocks:  # of equals any is right
        equal_s = first_token_s(longer, before.blocks)
        assert equal_s == pytest.approx(first_token_s(longer, after.blocks), rel=1e-6)


@given(questions(), st.floats(1, 100))
def test_a_slower_engine_never_fetches_less(question, times):
    cost = question.cost
    slower = question._replace(cost=PrefillCost(*(times * part for part in cost)))
    fetched = BestCut().plan(question)
    now = BestCut().plan(slower)
    # Of equals any is right: what counts is what the longer fetch would have cost.
    if now.blocks < fetched.blocks:
        least_s = first_token_s(slower, now.blocks)
        assert first_token_s(slower, fetched.blocks) == pytest.approx(least_s, rel=1e-6)


@given(questions(st.floats(0, 10)))
def test_a_deadline_is_bounded_by_the_time_saved_and_covers_the_expected_fetch(question):
    plan = BestCut().plan(question)
    left_s = expected_s(question, plan.blocks)
    if plan.blocks == question.first:
        assert plan.fetch_s == plan.deadline_s == 0
        return
    assert plan.fetch_s <= plan.deadline_s <= question.limit_s
    assert plan.deadline_s <= max(0.5 * plan.recompute_s, 1.5 * plan.fetch_s) + 1e-9
    assert left_s <= plan.recompute_s + question.queued_s + 1e-9


@given(questions(st.floats(0, 10)))
def test_a_request_never_waits_for_its_fetch_longer_than_it_takes_to_compute_it_instead(question):
    plan = BestCut().plan(question)
    assert plan.deadline_s <= plan.recompute_s + question.queued_s


def question_of(tiers: list[int], **changes: object) -> PlanQuestion:
    """64-token blocks of 1 MiB over host, disk and pool; 1 ms a token to compute."""
    question = PlanQuestion(
        tiers=tiers,
        block_bytes=1 << 20,
        block_tokens=64,
        estimates=[TierEstimate(0.0, 8e9), TierEstimate(1e-3, 1e9), TierEstimate(1e-3, 1e9)],
        names=NAMES,
        limit_s=5.0,
        cost=PrefillCost(0.01, 1e-3, 0.0),
        prompt_tokens=64 * len(tiers) + 10,
    )
    return question._replace(**changes)


def test_blocks_of_a_busy_tier_are_recomputed_and_the_reason_says_busy():
    busy = [TierEstimate(0.0, 8e9), TierEstimate(1e-3, 1e9), TierEstimate(1e-3, 1e9, 3e9)]
    plan = BestCut().plan(question_of([1] * 37 + [2] * 15, estimates=busy))
    assert plan.blocks == 37
    assert plan.reason == (
        "fetch 37 of 52 blocks from disk: 1.02 s against 3.35 s; last 15 recomputed: pool busy"
    )


def test_all_blocks_are_fetched_if_the_queue_is_empty():
    plan = BestCut().plan(question_of([1] * 37 + [2] * 15))
    assert plan.blocks == 52
    assert plan.reason == "fetch 52 of 52 blocks from disk and pool: 60 ms against 3.35 s"


def test_times_are_rounded_before_their_unit_is_chosen():
    for seconds, said in ((0.0994, "99 ms"), (0.0999, "0.10 s"), (0.1, "0.10 s")):
        nothing = question_of([], cost=PrefillCost(seconds, 0.0, 0.0))
        assert BestCut().plan(nothing).reason.startswith(f"recompute {said}:")


def test_no_block_is_fetched_from_a_tier_that_is_too_slow():
    slow = [TierEstimate(0.0, 8e9), TierEstimate(1e-3, 1e6), TierEstimate(1e-3, 1e9)]
    plan = BestCut().plan(question_of([1] * 10, estimates=slow))
    assert plan == Plan(0, 0.0, plan.recompute_s, plan.recompute_s, 0.0, plan.reason)
    assert plan.reason == "recompute 0.66 s, fetch none of 10 blocks held: disk too slow"


def test_blocks_that_the_engine_already_has_are_not_fetched():
    plan = BestCut().plan(question_of([1] * 10, have_tokens=300))
    assert plan.reason.startswith("fetch 6 of 6 blocks from disk")
    assert BestCut().plan(question_of([1] * 10, have_tokens=640)).blocks == 10
    nothing = BestCut().plan(question_of([], prompt_tokens=100))
    assert nothing.reason == "recompute 0.11 s: nothing that is missing is held"


def test_a_prompt_that_ends_with_a_block_computes_one_token():
    plan = BestCut().plan(question_of([0] * 4, prompt_tokens=256))
    assert plan.blocks == 4
    assert plan.expected_s == pytest.approx(0.011 + 4 * (1 << 20) / 8e9)


def test_all_blocks_that_arrive_in_time_are_fetched_if_the_prefill_cost_is_unknown():
    for changes in ({"cost": None}, {"prompt_tokens": 0}):
        unknown = question_of([0, 0, 1, 1], **changes)
        assert BestCut().plan(unknown) == FetchHeld().plan(unknown)
        assert FetchHeld().plan(unknown).blocks == 4
    late = FetchHeld().plan(question_of([1] * 100, limit_s=0.01))
    assert 0 < late.blocks < 100
    assert late.fetch_s <= 0.01
    assert "deadline" in late.reason


@given(questions(), st.floats(0, 1), st.floats(0, 1))
def test_more_time_never_fetches_less(question, less, more):
    less, more = sorted((less, more))
    a = FetchHeld().plan(question._replace(limit_s=less))
    b = FetchHeld().plan(question._replace(limit_s=more))
    assert a.blocks <= b.blocks
    assert a.fetch_s <= less


def test_behind_a_queue_a_slow_tier_is_worth_a_fetch_and_the_reason_says_why():
    slow = [TierEstimate(0.0, 8e9), TierEstimate(0.0, 1 << 22)]
    question = question_of([1] * 8, estimates=slow, names=NAMES[:2])
    idle = BestCut().plan(question)
    assert idle.blocks == 0, "8 MiB take 2 s from the disk, and 0.5 s to compute"
    busy = BestCut().plan(question._replace(queued_s=2.0))
    assert busy.blocks == 8
    assert busy.reason == (
        "fetch 8 of 8 blocks from disk: 2.02 s against 0.53 s behind 2.00 s of queued prefill"
    )
    between = BestCut().plan(question._replace(queued_s=0.5))
    assert 0 < between.blocks < 8
