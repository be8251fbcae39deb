"""A check of a member says how it answers: fine, late, refused or not at all."""

import itertools
import socket

import pytest

from holdfast.errors import Outcome, RefusedError
from holdfast.membership.members import Member
from holdfast.status import NodeStatus, TierStatus
from holdfast.tiers.pool import connection_checks
from holdfast.tiers.pool.connection_checks import LATE_S, TargetCondition, check_member
from holdfast.wire.remote.client import TargetClient

MEMBER = Member(id="t0", address="tcp://127.0.0.1:1")
TIERS = [TierStatus("disk")]


class Answers:
    """A target that answers the one question of a check."""

    def __init__(self, outcome=Outcome.OK, refusal="", trouble=""):
        self.outcome, self.refusal, self.trouble = outcome, refusal, trouble
        self.closed = False

    def stats(self, _deadline_s):
        return NodeStatus(tiers=TIERS if self.outcome is Outcome.OK else []), self.outcome

    def close(self):
        self.closed = True


@pytest.fixture
def clock(monkeypatch):
    """Have the answer take so many seconds."""

    def taking(seconds):
        times = itertools.count(100.0, seconds)
        monkeypatch.setattr(connection_checks.time, "monotonic", lambda: next(times))

    return taking


@pytest.mark.parametrize(
    ("seconds", "condition"), [(LATE_S, TargetCondition.FINE), (0.75, TargetCondition.LATE)]
)
def test_an_answer_is_fine_up_to_a_limit_and_late_after_it(clock, seconds, condition):
    clock(seconds)
    target = Answers()
    checked = check_member(MEMBER, lambda _: target, 2.0)
    assert (checked.condition, checked.tiers) == (condition, TIERS)
    if condition is TargetCondition.LATE:
        assert checked.text() == "late: answered after 0.75 s, more than 0.5 s"
    assert target.closed


def test_a_target_without_a_free_connection_is_busy():
    target = Answers(Outcome.UNSENT, trouble="busy: the target serves 1024 connections; raise it")
    checked = check_member(MEMBER, lambda _: target, 2.0)
    assert checked.condition is TargetCondition.BUSY
    assert checked.text() == "busy: the target serves 1024 connections; raise it"


def test_a_refusal_is_reported_in_the_targets_words():
    checked = check_member(MEMBER, lambda _: Answers(Outcome.GONE, refusal="no token"), 2.0)
    assert checked.text() == "refused: no token"

    def refuse(_member):
        raise RefusedError("certificate: of another authority")

    assert check_member(MEMBER, refuse, 2.0).text() == "refused: certificate: of another authority"


def test_a_listener_that_never_answers_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        member = Member(id="t0", address=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        checked = check_member(member, lambda each: TargetClient(each.address), 0.3)
    assert checked.condition is TargetCondition.UNREACHABLE
    assert checked.why
