"""What an outage or an ejection left behind is no evidence against a member that is well again."""

import random

import pytest

from holdfast.clock import ManualClock
from holdfast.tiers.breaker import BreakerPhase, CallEnding
from holdfast.tiers.pool.health import HealthOptions, PoolHealth
from holdfast.tiers.pool.target_statistics import CallKind

NAMES = [f"n{number}" for number in range(8)]
OPTIONS = HealthOptions()


class Pool:
    """Eight members that are asked in turn; what each takes, and who is down, is for the test."""

    def __init__(self):
        self.clock = ManualClock(100.0)
        self.health = PoolHealth(self.clock, OPTIONS, random.Random(3))
        self.health.keep(NAMES)
        self.down = set()
        self.slow_s = {}

    def ask(self, name, kind=CallKind.READ):
        """Ask one; False where nothing was let through."""
        call = self.health.begin(name, 1_000, kind)
        if call is not None:
            self.clock.advance(self.slow_s.get(name, 0.001))
            self.health.end(call, CallEnding.ERROR if name in self.down else CallEnding.OK)
        return call is not None

    def run(self, seconds):
        """Let users ask whom they trust, 20 times a second, and try who is due four times."""
        for tick in range(int(20 * seconds)):
            self.clock.advance(0.05)
            for name in NAMES:
                if self.health.trusted(name):
                    self.ask(name)
            for name in self.health.due_for_probe() if tick % 5 == 0 else ():
                while name in self.health.due_for_probe():
                    self.ask(name, CallKind.QUESTION)

    def report(self, name):
        return next(each for each in self.health.reports() if each.target == name)


@pytest.fixture
def pool():
    made = Pool()
    made.run(2)
    return made


@pytest.mark.parametrize("down_s", [10, 300])
def test_a_member_that_was_down_serves_after_its_probes_succeed(pool, down_s):
    pool.down = {"n1"}
    under_way = [pool.health.begin("n1", 1_000, CallKind.READ) for _ in range(20)]
    pool.run(1)
    for call in under_way:
        pool.health.end(call, CallEnding.ERROR)
    pool.run(down_s)
    assert pool.report("n1").breaker_opened >= 3
    pool.down = set()
    while pool.report("n1").phase is not BreakerPhase.CLOSED:
        pool.run(0.25)
    pool.run(OPTIONS.review_s)
    assert pool.health.trusted("n1")
    pool.run(20)
    assert pool.health.trusted("n1")
    assert pool.report("n1").ejections == 0


def test_a_member_that_fails_requests_but_passes_probes_is_ejected(pool):
    began_s = pool.clock.now()
    while not pool.report("n1").ejections:
        pool.down = {"n1"}
        pool.run(1)
        pool.down = set()
        pool.run(1)
        assert pool.clock.now() < began_s + 15
    pool.run(20)
    assert not pool.health.trusted("n1")


def test_a_member_that_is_down_is_handled_by_its_breaker_and_not_ejected(pool):
    pool.down = {"n1"}
    under_way = [pool.health.begin("n1", 1_000, CallKind.READ) for _ in range(20)]
    for call in under_way:
        pool.health.end(call, CallEnding.ERROR)
    assert pool.report("n1").failure_share > OPTIONS.failure_share_max
    pool.run(10)
    assert pool.report("n1").ejections == 0
    assert not pool.health.trusted("n1")


def test_answers_to_requests_sent_before_an_ejection_do_not_count_as_probes(pool):
    pool.slow_s = {"n2": 0.2}
    under_way = [pool.health.begin("n2", 1_000, CallKind.READ) for _ in range(10)]
    while not pool.report("n2").ejected:
        pool.run(0.1)
    ejected_s = pool.clock.now()
    pool.clock.advance(0.2)
    for call in under_way:
        pool.health.end(call, CallEnding.OK)
    pool.slow_s = {}
    assert pool.report("n2").first_byte_s is None
    while not pool.health.trusted("n2"):
        pool.run(0.25)
    assert pool.clock.now() < ejected_s + OPTIONS.ejection_s + OPTIONS.review_s + 1
    assert pool.report("n2").ejections == 1


def test_a_member_that_goes_down_during_its_probes_is_probed_again_when_it_is_back(pool):
    pool.slow_s = {"n2": 0.2}
    while not pool.report("n2").ejected:
        pool.run(0.1)
    pool.down = {"n2"}
    pool.run(OPTIONS.ejection_s + 5)
    assert pool.report("n2").phase is not BreakerPhase.CLOSED
    pool.down = set()
    pool.slow_s = {}
    asked = []
    ask = pool.ask
    pool.ask = lambda name, *kind: asked.append(name) or ask(name, *kind)
    while not pool.health.trusted("n2"):
        pool.run(0.25)
    assert asked.count("n2") >= OPTIONS.breaker.probes + OPTIONS.samples
