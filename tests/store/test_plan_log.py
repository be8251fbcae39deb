"""The log of plans: what they expected, how they ended, and who may say so."""

import msgspec
import pytest

from holdfast.clock import ManualClock
from holdfast.errors import NotFollowed
from holdfast.plan.planner import Plan
from holdfast.status import PlanAccuracy, PlanTimes
from holdfast.store.activity import Activity
from holdfast.store.estimates import EngineId
from holdfast.store.plan_log import (
    PLANS_KEPT,
    Delivery,
    PlanEnding,
    PlanLog,
    PlanRecord,
    plan_accuracy,
)

MIB = 1 << 20
ENGINE = EngineId("vllm", "f" * 32)
RIVAL = ENGINE._replace(domain="aa" * 16)
OWN = ENGINE._replace(domain="bb" * 16)


@pytest.fixture
def log():
    return PlanLog(ManualClock(), Activity())


def record(first_token_s=0.1, engine=ENGINE):
    plan = Plan(3, 0.02, first_token_s, 1.0, 0.5, "fetch 3 of 3 blocks")
    return PlanRecord(engine, 100, 0, 3, plan, MIB)


def test_a_domain_cannot_end_or_replace_a_plan_of_another_domain(log):
    number = log.add(record(engine=OWN))
    log.fetched(RIVAL, number, 1, 9.0, "late")
    log.ended(RIVAL, PlanEnding(number, 9.0, 9.0))
    log.add(record(engine=RIVAL), instead_of=number)
    kept = log.status().plans[1]
    assert (kept.plan, kept.outcome, kept.landed_blocks) == (number, "", None)
    assert kept.actual == PlanTimes(None, None)


def test_a_plan_record_keeps_expected_and_actual_times(log):
    number = log.add(record())
    log.fetched(ENGINE, number, 3, 0.03, "ok")
    delivery = log.ended(ENGINE, PlanEnding(number, 0.04, 0.11))
    assert delivery == Delivery(3 * MIB, pytest.approx(0.01))
    answer = log.status()
    (plan,) = answer.plans
    assert plan.expected == PlanTimes(0.02, 0.1)
    assert plan.actual == PlanTimes(0.03, 0.11)
    assert answer.right.ended == answer.right.within_25_percent == 1
    assert msgspec.json.encode(answer)


def test_a_repeated_plan_replaces_the_first_and_the_oldest_plans_are_dropped(log):
    first = log.add(record())
    second = log.add(record(), instead_of=first)
    assert [plan.plan for plan in log.status().plans] == [second]
    for _ in range(PLANS_KEPT + 5):
        log.add(record())
    assert len(log.status().plans) == PLANS_KEPT
    log.fetched(ENGINE, 1, 3, 0.1, "ok")
    log.ended(ENGINE, PlanEnding(1, 0.1, 0.1))


def told(log, number):
    """Return what is told of one plan, and how many plans count for the accuracy."""
    answer = log.status()
    (plan,) = [plan for plan in answer.plans if plan.plan == number]
    return plan.not_followed, plan.actual.first_token_s, answer.right.ended


@pytest.mark.parametrize("why", list(NotFollowed))
def test_a_plan_that_was_not_followed_does_not_count_in_the_accuracy(log, why):
    number = log.add(record(8.68))
    log.fetched(ENGINE, number, 3, 0.02, "ok")
    log.not_followed(ENGINE, number, why, 0.3)
    assert told(log, number) == (str(why), 0.3, 0)
    assert log.status().right.not_followed == 1
    assert msgspec.json.encode(log.status())


def test_a_plan_that_was_not_followed_yields_no_load_time(log):
    number = log.add(record(8.68))
    log.fetched(ENGINE, number, 3, 0.02, "ok")
    log.not_followed(ENGINE, number, NotFollowed.PREEMPTED, 0.3)
    assert log.ended(ENGINE, PlanEnding(number, 0.05, 0.3)) is None


def test_a_plan_to_fetch_without_a_fetch_counts_as_not_followed(log):
    number = log.add(record(8.68))
    assert log.ended(ENGINE, PlanEnding(number, 0.05, 0.3)) is None
    assert told(log, number) == ("not_fetched", 0.3, 0)
    log.fetched(ENGINE, number, 0, 9.0, "late")
    assert told(log, number) == (None, 0.3, 1), "the engine had stopped waiting for it"


def test_a_plan_to_compute_needs_no_fetch(log):
    plan = Plan(2, 0.0, 0.1, 0.1, 0.0, "recompute")
    number = log.add(PlanRecord(ENGINE, 100, 40, 3, plan, MIB, first_block=2))
    log.ended(ENGINE, PlanEnding(number, 0.0, 0.1))
    assert told(log, number) == (None, 0.1, 1)


def test_plans_of_a_lost_engine_count_as_not_followed_unless_it_reports_again(log):
    numbers = [log.add(record()) for _ in range(3)]
    for number in numbers:
        log.fetched(ENGINE, number, 3, 0.02, "ok")
    log.ended(ENGINE, PlanEnding(numbers[0], 0.03, 0.1))
    log.engine_gone(ENGINE, [*numbers, 99])
    assert [told(log, number)[0] for number in numbers] == [
        None, "engine_gone", "engine_gone",
    ]  # fmt: skip
    log.ended(ENGINE, PlanEnding(numbers[1], 0.03, 0.1))
    assert told(log, numbers[1]) == (None, 0.1, 2)


def test_a_domain_cannot_mark_another_domains_plan_as_not_followed(log):
    number = log.add(record(engine=OWN))
    log.not_followed(RIVAL, number, NotFollowed.HAD, 0.3)
    log.engine_gone(RIVAL, [number])
    assert told(log, number) == (None, None, 0)


def carried_out(expected_s, actual_s, outcome="ok", not_followed=None):
    plan = Plan(1, 0.0, expected_s, 0.0, 1.0, "")
    return PlanRecord(
        *(ENGINE, 100, 0, 1, plan, 4096),
        first_token_s=actual_s, outcome=outcome, not_followed=not_followed,
    )  # fmt: skip


def test_late_plans_are_counted_among_ended_plans_that_had_an_estimate():
    running, unexpected = carried_out(0.1, None), carried_out(0.0, 0.4, "late")
    assert plan_accuracy([running, unexpected]) == PlanAccuracy()
    ended = [carried_out(0.1, 0.11), carried_out(0.1, 0.2, "late")]
    found = plan_accuracy([running, unexpected, *ended])
    assert (found.ended, found.within_25_percent, found.late) == (2, 1, 1)


def test_plans_that_were_not_followed_are_counted_separately():
    followed = [carried_out(0.1, 0.11), carried_out(0.1, 0.2, "late")]
    others = [
        carried_out(8.68, 0.3, "", NotFollowed.HAD),
        carried_out(0.1, None, "", NotFollowed.ENDED),
        carried_out(0.1, 0.1, "late", NotFollowed.PREEMPTED),
    ]
    counted = msgspec.structs.replace(plan_accuracy(followed), not_followed=3)
    assert plan_accuracy(followed + others) == counted
