"""The circuit breaker opens in time, probes once at a time, and makes legal transitions only."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.tiers.breaker import BreakerOptions, BreakerPhase, CallEnding, CircuitBreaker

LEGAL = {
    (BreakerPhase.CLOSED, BreakerPhase.OPEN),
    (BreakerPhase.OPEN, BreakerPhase.HALF_OPEN),
    (BreakerPhase.HALF_OPEN, BreakerPhase.OPEN),
    (BreakerPhase.HALF_OPEN, BreakerPhase.CLOSED),
}


class Scene:
    def __init__(self, seed=1, **options):
        self.clock = ManualClock(500.0)
        self.options = BreakerOptions(**options)
        self.breaker = CircuitBreaker(self.clock, self.options, random.Random(seed))

    def ask(self, ending, took_s=0.001):
        ticket = self.breaker.begin()
        assert ticket is not None
        self.clock.advance(took_s)
        self.breaker.end(ticket, ending)

    def open(self):
        for _ in range(self.options.failures):
            self.ask(CallEnding.ERROR)
        assert self.breaker.phase() is BreakerPhase.OPEN

    def half_open(self):
        self.open()
        self.clock.advance(self.options.pause_s * (1 + self.options.jitter))
        assert self.breaker.phase() is BreakerPhase.HALF_OPEN


def test_successive_failures_open_the_breaker():
    scene = Scene()
    scene.ask(CallEnding.ERROR)
    scene.ask(CallEnding.ERROR)
    scene.ask(CallEnding.OK)
    scene.ask(CallEnding.ERROR)
    scene.ask(CallEnding.ERROR)
    assert scene.breaker.phase() is BreakerPhase.CLOSED
    scene.ask(CallEnding.ERROR)
    assert scene.breaker.phase() is BreakerPhase.OPEN
    assert scene.breaker.begin() is None


def test_answers_that_a_target_is_busy_open_and_close_nothing():
    scene = Scene()
    for _ in range(100):
        scene.ask(CallEnding.BUSY, took_s=0.1)
    assert scene.breaker.phase() is BreakerPhase.CLOSED
    scene.half_open()
    for _ in range(10):
        scene.ask(CallEnding.BUSY)
    assert scene.breaker.phase() is BreakerPhase.HALF_OPEN


def test_a_target_that_never_answers_opens_the_breaker_within_2_s():
    scene = Scene()
    scene.clock.advance(1_000)
    assert scene.breaker.begin() is not None
    opened_s = None
    for step in range(200):
        scene.clock.advance(0.01)
        if scene.breaker.begin() is None:
            opened_s = (step + 1) * 0.01
            break
    assert opened_s == pytest.approx(1.5, abs=0.011)


def test_a_target_that_never_answers_hedged_requests_opens_the_breaker():
    scene = Scene()
    waited_s = 0.0
    while scene.breaker.phase() is BreakerPhase.CLOSED:
        scene.ask(CallEnding.CANCELLED, took_s=0.005)
        waited_s += 0.005
        scene.clock.advance(0.1)
        assert waited_s < 2
    assert waited_s == pytest.approx(1.5, abs=0.01)


def test_time_without_requests_does_not_open_the_breaker():
    scene = Scene()
    scene.ask(CallEnding.CANCELLED, took_s=1.0)
    scene.clock.advance(3_600)
    assert scene.breaker.phase() is BreakerPhase.CLOSED
    scene.ask(CallEnding.OK)
    assert scene.breaker.phase() is BreakerPhase.CLOSED


def test_a_long_answer_keeps_the_breaker_closed_and_a_trickle_opens_it():
    steady, trickle = Scene(), Scene()
    answers = [(scene, scene.breaker.begin()) for scene in (steady, trickle)]
    for _ in range(100):
        for scene, ticket in answers:
            scene.clock.advance(0.1)
            scene.breaker.on_progress(ticket, 10_000 if scene is steady else 100)
            scene.breaker.phase()
    assert steady.breaker.opened == 0
    assert trickle.breaker.opened == 1


@pytest.mark.parametrize("good", [CallEnding.OK, CallEnding.EMPTY])
def test_a_half_open_breaker_permits_one_probe_at_a_time(good):
    scene = Scene()
    scene.half_open()
    first = scene.breaker.begin()
    assert first is not None
    assert scene.breaker.begin() is None
    scene.breaker.end(first, CallEnding.CANCELLED)
    scene.ask(good)
    assert scene.breaker.phase() is BreakerPhase.HALF_OPEN
    scene.ask(good)
    assert scene.breaker.phase() is BreakerPhase.CLOSED


def test_a_probe_that_fails_or_hangs_opens_the_breaker_for_twice_as_long():
    scene = Scene(jitter=0.0)
    scene.half_open()
    scene.ask(CallEnding.ERROR)
    assert scene.breaker.phase() is BreakerPhase.OPEN
    scene.clock.advance(1.99)
    assert scene.breaker.phase() is BreakerPhase.OPEN
    scene.clock.advance(0.01)
    assert scene.breaker.begin() is not None
    scene.clock.advance(1.5)
    assert scene.breaker.phase() is BreakerPhase.OPEN
    scene.clock.advance(3.99)
    assert scene.breaker.phase() is BreakerPhase.OPEN
    scene.clock.advance(0.01)
    assert scene.breaker.phase() is BreakerPhase.HALF_OPEN


def test_breaker_pauses_have_a_limit_and_restart_after_a_recovery():
    scene = Scene(jitter=0.0)
    scene.half_open()
    for _ in range(10):
        scene.ask(CallEnding.ERROR)
        scene.clock.advance(30)
        assert scene.breaker.phase() is BreakerPhase.HALF_OPEN
    scene.ask(CallEnding.OK)
    scene.ask(CallEnding.OK)
    scene.open()
    scene.clock.advance(1.0)
    assert scene.breaker.phase() is BreakerPhase.HALF_OPEN


def test_answers_from_an_earlier_phase_are_ignored():
    scene = Scene()
    old = [scene.breaker.begin() for _ in range(20)]
    scene.half_open()
    for ticket in old[:10]:
        scene.breaker.end(ticket, CallEnding.ERROR)
    assert scene.breaker.phase() is BreakerPhase.HALF_OPEN
    for ticket in old[10:]:
        scene.breaker.end(ticket, CallEnding.OK)
    assert scene.breaker.phase() is BreakerPhase.HALF_OPEN
    assert scene.breaker.allows()


def test_clients_do_not_probe_at_the_same_time():
    pauses = set()
    for seed in range(10):
        scene = Scene(seed)
        scene.open()
        started_s = scene.clock.now()
        while scene.breaker.phase() is BreakerPhase.OPEN:
            scene.clock.advance(0.001)
        pauses.add(round(scene.clock.now() - started_s, 3))
    assert len(pauses) > 5
    assert 1.0 <= min(pauses) <= max(pauses) <= 1.251


@given(
    st.integers(0, 99),
    st.lists(
        st.one_of(
            st.just("begin"),
            st.tuples(st.sampled_from(CallEnding), st.integers(0, 5)),
            st.tuples(st.just("progress"), st.integers(0, 200_000)),
            st.floats(0, 3),
        ),
        max_size=80,
    ),
)
def test_the_breaker_makes_only_legal_transitions_in_every_history(seed, steps):
    scene = Scene(seed)
    tickets = []
    phase = scene.breaker.phase()
    probing = None
    for step in steps:
        if step == "begin":
            allowed = scene.breaker.allows()
            ticket = scene.breaker.begin()
            assert (ticket is not None) == allowed
            tickets += [ticket] if ticket else []
        elif isinstance(step, float):
            scene.clock.advance(step)
        elif tickets and step[0] == "progress":
            scene.breaker.on_progress(tickets[-1], step[1])
        elif tickets:
            scene.breaker.end(tickets.pop(step[1] % len(tickets)), step[0])
        before, phase = phase, scene.breaker.phase()
        assert before is phase or (before, phase) in LEGAL
        if phase is BreakerPhase.HALF_OPEN:
            probing = [t for t in tickets if t == scene.breaker._phase_number]
            assert len(probing) <= 1
        assert scene.breaker._outstanding >= 0
        assert scene.breaker.allows() == (
            phase is BreakerPhase.CLOSED or (phase is BreakerPhase.HALF_OPEN and not probing)
        )
