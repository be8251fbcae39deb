"""What one target's answers say of it: like with like, and of writes nothing about time."""

import random

import pytest

from holdfast.clock import ManualClock
from holdfast.tiers.breaker import BreakerOptions, CallEnding, CircuitBreaker
from holdfast.tiers.pool.target_statistics import AnswerTimes, CallKind, TargetStatistics


@pytest.fixture
def evidence():
    breaker = CircuitBreaker(ManualClock(1.0), BreakerOptions(), random.Random(1))
    return TargetStatistics(breaker, 1.0)


def test_each_kind_of_call_has_its_own_latency(evidence):
    for _ in range(10):
        evidence.learn(CallKind.QUESTION, CallEnding.OK, 0.001, 0.001)
        evidence.learn(CallKind.READ, CallEnding.OK, 0.03, 0.5)
        evidence.learn(CallKind.WRITE, CallEnding.OK, 2.0, 2.0)
    assert evidence.answers[CallKind.QUESTION].latency_s == pytest.approx(0.001)
    assert evidence.answers[CallKind.READ].latency_s == pytest.approx(0.03)
    assert evidence.slowest_s() == pytest.approx(0.03)
    assert evidence.fresh == 30


def test_an_empty_read_counts_as_an_answer_and_yields_no_read_latency(evidence):
    for _ in range(30):
        evidence.learn(CallKind.READ, CallEnding.EMPTY, 0.0003, 0.0003)
    assert evidence.answers[CallKind.READ].latency_s is None
    assert evidence.delays.late_s is None
    evidence.learn(CallKind.READ, CallEnding.ERROR, 0.1, 0.1)
    assert evidence.failure_share == pytest.approx(1 / 32)
    evidence.learn(CallKind.READ, CallEnding.EMPTY, 0.0003, 0.0003)
    assert evidence.failure_share < 1 / 32


def test_empty_reads_slower_than_successful_reads_raise_the_read_latency(evidence):
    for _ in range(20):
        evidence.learn(CallKind.READ, CallEnding.OK, 0.01, 0.01)
    evidence.learn(CallKind.READ, CallEnding.EMPTY, 0.0003, 0.0003)
    assert evidence.answers[CallKind.READ].latency_s == pytest.approx(0.01)
    for _ in range(200):
        evidence.learn(CallKind.READ, CallEnding.EMPTY, 0.3, 0.3)
    assert evidence.answers[CallKind.READ].latency_s == pytest.approx(0.3, rel=0.01)


def test_failures_of_every_kind_of_call_count_and_cancelled_calls_do_not(evidence):
    for kind in CallKind:
        evidence.learn(kind, CallEnding.ERROR, 0.1, 0.1)
    failing = evidence.failure_share
    assert failing == pytest.approx(1 - (31 / 32) ** 3)
    latency_s = evidence.answers[CallKind.READ].latency_s
    evidence.learn(CallKind.READ, CallEnding.CANCELLED, 9.0, 9.0)
    assert (evidence.failure_share, evidence.answers[CallKind.READ].latency_s) == (
        failing,
        latency_s,
    )
    assert evidence.fresh == 3


def test_early_failures_do_not_lower_the_latency_of_a_target():
    answers = AnswerTimes()
    answers.learn(CallEnding.OK, 0.1)
    answers.learn(CallEnding.ERROR, 0.01)
    assert answers.latency_s == pytest.approx(0.1)
    answers.learn(CallEnding.ERROR, 0.9)
    assert answers.latency_s == pytest.approx(0.2)


def test_an_ejection_clears_the_statistics_of_a_target(evidence):
    evidence.learn(CallKind.READ, CallEnding.ERROR, 0.1, 0.1)
    evidence.forget()
    assert (evidence.answers[CallKind.READ].latency_s, evidence.slowest_s()) == (None, 0.0)
    assert (evidence.failure_share, evidence.fresh) == (0.0, 0)
