"""The circuit breaker of a server: parallel calls during a probe, and error replies over time."""

import logging
import threading
import time

import pytest

from holdfast.clock import ManualClock
from holdfast.errors import Outcome
from holdfast.tiers.breaker import BreakerPhase
from holdfast.tiers.reachability import LIMITS, REFUSAL_S, ServerBackoff
from holdfast.wire.remote.stream import Deadline


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def backoff(clock):
    return ServerBackoff("server s", clock)


def fail():
    raise ConnectionRefusedError


def succeed():
    return ""


def enter_half_open(backoff, clock):
    """Let calls fail until the breaker opens, then end its pause."""
    for _ in range(LIMITS.failures):
        assert backoff.call(fail, Deadline.within(60)) is Outcome.GONE
    assert not backoff.allows()
    clock.advance(LIMITS.pause_max_s)
    assert backoff.health()["phase"] == BreakerPhase.HALF_OPEN


def test_while_a_probe_is_in_progress_no_call_is_allowed(backoff, clock):
    enter_half_open(backoff, clock)
    during = []

    def probe():
        during.append(backoff.allows())
        return ""

    assert backoff.allows()
    assert backoff.call(probe, Deadline.within(60)) is Outcome.OK
    assert during == [False]
    assert backoff.allows()


class WatchedDeadline(Deadline):
    """A deadline that sets `read_again` at its second use: the call then waits for the probe."""

    def __init__(self, seconds):
        self.uses = 0
        self.read_again = threading.Event()
        super().__init__(time.monotonic() + seconds)

    @property
    def at(self):
        self.uses += 1
        if self.uses > 1:
            self.read_again.set()
        return self._at

    @at.setter
    def at(self, at):
        self._at = at


@pytest.mark.parametrize(("ending", "outcome"), [(succeed, Outcome.OK), (fail, Outcome.GONE)])
def test_a_call_during_a_probe_waits_and_has_the_same_outcome(backoff, clock, ending, outcome):
    enter_half_open(backoff, clock)
    begun, end = threading.Event(), threading.Event()
    deadline, outcomes = WatchedDeadline(60), []

    def probe():
        begun.set()
        end.wait(60)
        return ending()

    def call(work, until):
        outcomes.append(backoff.call(work, until))

    probing = threading.Thread(target=call, args=(probe, Deadline.within(120)))
    beside = threading.Thread(target=call, args=(ending, deadline))
    probing.start()
    assert begun.wait(60)
    beside.start()
    while beside.is_alive() and not deadline.read_again.wait(0.01):
        pass
    before = list(outcomes)
    end.set()
    probing.join(60)
    beside.join(60)
    assert before == [], "the call does not end before the probe"
    assert outcomes == [outcome] * 2


def test_a_call_during_a_probe_is_late_at_its_deadline(backoff, clock):
    enter_half_open(backoff, clock)
    outcomes = []

    def probe():
        outcomes.append(backoff.call(succeed, Deadline.within(0.01)))
        return ""

    assert backoff.call(probe, Deadline.within(60)) is Outcome.OK
    assert outcomes == [Outcome.LATE]


def test_an_error_reply_is_the_state_for_a_limited_time(backoff, clock):
    backoff.record_refusal("LOADING the dataset")
    assert backoff.health()["state"] == "LOADING the dataset"
    clock.advance(REFUSAL_S)
    assert backoff.health()["state"] == "active"


def test_equal_error_replies_are_logged_once_until_they_are_old(backoff, clock, caplog):
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        backoff.record_refusal("OOM")
        clock.advance(REFUSAL_S / 2)
    assert len(caplog.records) == 1
    clock.advance(REFUSAL_S)
    backoff.record_refusal("OOM")
    assert len(caplog.records) == 2
    backoff.record_refusal("LOADING")
    assert len(caplog.records) == 3
