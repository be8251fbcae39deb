"""Outliers are left alone, never too many of them, and the pool's tail stays short."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import ManualClock
from holdfast.tiers.breaker import BreakerPhase, CallEnding
from holdfast.tiers.pool.health import HealthOptions, PoolHealth, ejected_max
from holdfast.tiers.pool.target_statistics import CallKind


class Scene:
    def __init__(self, count, seed=5):
        self.clock = ManualClock(100.0)
        self.names = [f"n{number}" for number in range(count)]
        self.health = PoolHealth(self.clock, HealthOptions(), random.Random(seed))
        self.health.keep(self.names)

    def ask(self, name, took_s, ending=CallEnding.OK, kind=CallKind.READ):
        """Ask one target; the clock does not move."""
        call = self.health.begin(name, 1_000, kind)
        if call is not None:
            self.end(call, took_s, ending)
        return call is not None

    def end(self, call, took_s, ending=CallEnding.OK):
        """End a call as if it had begun so long ago."""
        call.began_s = self.clock.now() - took_s
        self.health.end(call, ending)

    def run(self, seconds, took_s, failing=()):
        """Ask everybody 20 times a second; `took_s` by name, 1 ms if not there."""
        for tick in range(int(seconds * 20)):
            self.clock.advance(0.05)
            for name in self.names:
                bad = name in failing and tick % failing[name] == 0
                self.ask(name, took_s.get(name, 0.001), CallEnding.ERROR if bad else CallEnding.OK)

    @property
    def ejected(self):
        return {report.target for report in self.health.reports() if report.ejected}


def test_a_slow_target_is_ejected_within_seconds_and_comes_back_later():
    scene = Scene(4)
    scene.run(2, {"n2": 0.101})
    assert scene.ejected == {"n2"}
    assert not scene.health.trusted("n2")
    assert scene.health.begin("n2", 1) is None
    scene.run(31, {})
    assert scene.ejected == set()
    assert scene.health.trusted("n2")


def test_a_target_that_stays_slow_is_ejected_for_longer_each_time():
    scene = Scene(4)
    out_s = []
    was_out = False
    for tick in range(20 * 200):
        scene.run(0.05, {"n2": 0.101})
        is_out = "n2" in scene.ejected
        out_s += [tick / 20] if is_out != was_out else []
        was_out = is_out
    lengths = [end - start for start, end in zip(out_s[::2], out_s[1::2], strict=False)]
    assert lengths == pytest.approx([30, 60], abs=0.2)


def test_the_measured_time_of_a_read_ends_at_its_first_byte():
    scene = Scene(3)
    call = scene.health.begin("n0", 1 << 30, CallKind.READ)
    scene.clock.advance(0.002)
    scene.health.on_progress(call, 48)
    scene.clock.advance(0.9)
    scene.health.on_progress(call, 1 << 20)
    scene.health.end(call, CallEnding.OK)
    assert scene.health.reports()[0].first_byte_s == pytest.approx(0.002)


def test_the_wait_for_a_free_connection_does_not_count_as_latency_of_the_target():
    scene = Scene(3)
    call = scene.health.begin("n0", 1 << 20, CallKind.READ)
    for moved, waited_s in ((0, 1.2), (48, 0.002), (0, 0.5)):  # the last: another lane's
        scene.clock.advance(waited_s)
        scene.health.on_progress(call, moved)
    scene.health.end(call, CallEnding.OK)
    assert scene.health.reports()[0].first_byte_s == pytest.approx(0.002)


def test_read_latencies_are_not_compared_with_lookup_latencies():
    scene = Scene(4)
    for _ in range(200):
        scene.clock.advance(0.05)
        scene.ask("n0", 0.03, kind=CallKind.READ)
        scene.ask("n1", 0.3, kind=CallKind.WRITE)
        for name in scene.names:
            scene.ask(name, 0.0005, kind=CallKind.QUESTION)
    assert scene.ejected == set()
    for _ in range(40):
        scene.clock.advance(0.05)
        for name in scene.names:
            scene.ask(name, 0.1 if name == "n3" else 0.0005, kind=CallKind.QUESTION)
    assert scene.ejected == {"n3"}


@pytest.mark.parametrize("took_s", [0.03, 0.3])
def test_a_target_that_returns_blocks_is_not_compared_with_targets_that_miss(took_s):
    scene = Scene(3)
    for _ in range(200):
        scene.clock.advance(0.05)
        scene.ask("n0", took_s)
        for name in ("n1", "n2"):
            scene.ask(name, 0.0003, CallEnding.EMPTY)
    assert scene.ejected == set()
    first_bytes = [report.first_byte_s for report in scene.health.reports()]
    assert first_bytes == [pytest.approx(took_s), None, None]
    assert scene.health.hedge_after_s() == pytest.approx(took_s)


def test_a_member_that_left_keeps_its_breaker_and_does_not_count_towards_the_cap():
    scene = Scene(4)
    for _ in range(3):
        scene.ask("n0", 0.001, CallEnding.ERROR)
    scene.health.keep(scene.names, scene.names[1:])
    assert not scene.health.trusted("n0"), "its breaker is what it was"
    scene.run(2, {"n2": 0.101})
    assert scene.ejected == {"n2"}, "one of three members may go"


def test_a_target_that_fails_one_time_in_five_is_ejected():
    scene = Scene(5)
    scene.run(5, {}, failing={"n1": 5})
    assert scene.ejected == {"n1"}


def test_a_target_that_fails_one_time_in_fifty_is_not_ejected():
    scene = Scene(5)
    scene.run(30, {}, failing={"n1": 50})
    assert scene.ejected == set()


@pytest.mark.parametrize("took_s", [0.0011, 0.0029, 0.02, 0.08])
def test_a_slightly_slower_target_is_not_ejected(took_s):
    scene = Scene(4)
    scene.run(5, {"n2": took_s})
    assert scene.ejected == set()


def test_no_target_is_ejected_if_all_are_slow():
    scene = Scene(8)
    scene.run(5, {})
    scene.run(5, dict.fromkeys(scene.names, 0.5))
    assert scene.ejected == set()


def test_no_target_of_two_is_ejected():
    scene = Scene(2)
    scene.run(5, {"n1": 0.5})
    assert scene.ejected == set()


@pytest.mark.parametrize(
    ("targets", "most"), [(0, 0), (2, 0), (3, 1), (4, 1), (7, 2), (10, 3), (16, 4), (100, 30)]
)
def test_at_most_30_per_cent_of_targets_or_one_of_three_may_be_ejected(targets, most):
    assert ejected_max(targets) == most


@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.sampled_from([0.001, 0.01, 0.1, 1.0]),
            st.sampled_from(CallEnding),
            st.sampled_from([0.0, 0.3, 5.0]),
        ),
        max_size=300,
    ),
    st.integers(1, 12),
)
def test_ejections_never_exceed_the_cap(count, asks, later_count):
    scene = Scene(count)
    for number, took_s, ending, wait_s in asks:
        scene.clock.advance(wait_s)
        for offset in range(3):
            scene.ask(f"n{(number + offset) % count}", took_s * (offset + 1) ** 3, ending)
        assert len(scene.ejected) <= ejected_max(count)
    scene.health.keep([f"n{number}" for number in range(later_count)])
    assert len(scene.ejected) <= ejected_max(later_count)


def test_a_much_slower_target_takes_the_ejection_of_a_mild_outlier():
    scene = Scene(4)
    scene.run(3, {"n2": 0.1})
    assert scene.ejected == {"n2"}
    scene.run(3, {"n1": 0.2})
    assert scene.ejected == {"n2"}, "no more may go, and it is not worth the change"
    scene.run(5, {"n1": 0.5})
    assert scene.ejected == {"n1"}
    scene.run(3, {"n1": 0.5, "n2": 0.1})
    assert scene.ejected == {"n1"}


def test_a_failing_target_stays_ejected_if_another_becomes_slow():
    scene = Scene(5)
    scene.run(5, {}, failing={"n1": 5})
    scene.run(5, {"n2": 1.0})
    assert scene.ejected == {"n1"}


def test_open_breakers_count_towards_the_cap():
    scene = Scene(4)
    for _ in range(3):
        scene.ask("n0", 0.001, CallEnding.ERROR)
    scene.run(2, {"n2": 0.101})
    reports = {report.target: report for report in scene.health.reports()}
    assert reports["n0"].phase is not BreakerPhase.CLOSED or not reports["n2"].ejected


def test_a_target_without_history_may_receive_requests():
    scene = Scene(2)
    assert scene.health.trusted("new")
    assert scene.ask("new", 0.001)


def test_calls_to_a_forgotten_target_end_without_an_error():
    scene = Scene(2)
    call = scene.health.begin("n1", 100)
    scene.health.keep(["n0"])
    scene.health.on_progress(call, 10)
    scene.end(call, 0.001)
    assert [report.target for report in scene.health.reports()] == ["n0"]


def test_the_target_with_fewer_bytes_in_flight_is_chosen():
    scene = Scene(2)
    call = scene.health.begin("n0", 1 << 20)
    assert {scene.health.choose(["n0", "n1"]) for _ in range(20)} == {"n1"}
    scene.end(call, 0.001)
    assert {scene.health.choose(["n0", "n1"]) for _ in range(60)} == {"n0", "n1"}
    assert scene.health.choose(["n1"]) == "n1"


def test_two_choices_spread_load_better_than_one():
    loads = {}
    for choices in (1, 2):
        scene = Scene(10)
        chance = random.Random(9)
        for _ in range(2_000):
            drawn = chance.choice(scene.names)
            name = scene.health.choose(scene.names) if choices == 2 else drawn
            scene.health.begin(name, 1_000)
        sizes = [report.in_flight_bytes for report in scene.health.reports()]
        loads[choices] = max(sizes) - sum(sizes) / len(sizes)
    assert loads[2] < loads[1] / 5


def test_the_hedge_delay_follows_the_latencies_of_a_typical_target():
    scene = Scene(5)
    assert scene.health.hedge_after_s() is None
    for name in scene.names:
        for number in range(40):
            scene.ask(name, 0.100 if name == "n4" else 0.001 + number * 1e-5)
    assert 0.001 < scene.health.hedge_after_s() < 0.0015


def test_reports_show_what_was_measured():
    scene = Scene(3)
    scene.health.begin("n1", 77)
    scene.run(2, {"n0": 0.004})
    report = {each.target: each for each in scene.health.reports()}
    assert report["n0"].first_byte_s == pytest.approx(0.004)
    assert report["n0"].latency_s is None
    assert report["n0"].late_s == pytest.approx(0.004)
    assert report["n1"].in_flight_bytes == 77
    assert report["n2"].phase is BreakerPhase.CLOSED


def test_one_of_four_targets_100_ms_late_raises_the_p99_for_at_most_five_seconds():
    def fetches(slow):
        """Ask four targets 400 times a second for 15 s; return (when, how long) of each."""
        scene = Scene(4)
        chance = random.Random(7)
        under_way, done = [], []
        for tick in range(15 * 400):
            scene.clock.advance(1 / 400)
            now_s = scene.clock.now()
            for call, took_s in [c for c in under_way if c[0].began_s + c[1] <= now_s]:
                under_way.remove((call, took_s))
                scene.end(call, took_s)
            name = scene.names[tick % 4]
            took_s = 0.001 + chance.expovariate(1_000) + (0.1 if name == slow else 0.0)
            # Who is left alone is recomputed at once: it costs no waiting for the answer.
            if call := scene.health.begin(name, 1_000, CallKind.READ):
                under_way.append((call, took_s))
                done.append((tick / 400, took_s))
        return done

    def p99(done):
        ordered = sorted(took_s for at_s, took_s in done if at_s >= 5)
        return ordered[int(0.99 * len(ordered))]

    assert p99(fetches(slow="n3")) <= 1.3 * p99(fetches(slow=None))


def test_a_probed_target_is_not_trusted_and_stays_unsure_for_a_time_afterwards():
    scene, options = Scene(4), HealthOptions()
    assert scene.health.trusted("n1")
    assert not scene.health.unsure("n1")
    for _ in range(options.breaker.failures):
        scene.ask("n1", 0.01, CallEnding.ERROR)
    assert not scene.health.trusted("n1")
    assert scene.health.unsure("n1")
    assert scene.health.due_for_probe() == []
    scene.clock.advance(2)
    assert scene.health.due_for_probe() == ["n1"]
    assert not scene.health.trusted("n1")
    for _ in range(options.breaker.probes):
        assert scene.ask("n1", 0.01)
    assert scene.health.due_for_probe() == []
    assert scene.health.trusted("n1")
    assert scene.health.unsure("n1")
    scene.clock.advance(options.substitutes_s + 1)
    assert not scene.health.unsure("n1")


def test_the_down_time_of_a_target_counts_from_when_it_was_last_up():
    scene = Scene(3)
    assert scene.health.down(15) == set()
    scene.clock.advance(100)
    assert scene.health.down(15) == set()
    for _ in range(3):
        scene.ask("n1", 0.01, CallEnding.ERROR)
    scene.clock.advance(10)
    assert scene.health.down(15) == set()
    scene.clock.advance(6)
    assert scene.health.down(15) == {"n1"}


def ejected_scene():
    """A pool whose n2 has just come back from an ejection."""
    scene, options = Scene(4), HealthOptions()
    scene.run(2, {"n2": 0.101})
    assert scene.ejected == {"n2"}
    assert scene.health.due_for_probe() == []
    scene.clock.advance(options.ejection_s + 1)
    assert scene.ejected == set()
    return scene, options


def test_an_ejected_target_is_probed_before_it_gets_user_requests():
    scene, options = ejected_scene()
    assert scene.health.due_for_probe() == ["n2"]
    assert not scene.health.trusted("n2")
    for _ in range(options.samples):
        assert scene.ask("n2", 0.001)
    assert scene.health.due_for_probe() == [], "enough was asked to judge it"
    assert not scene.health.trusted("n2")
    scene.clock.advance(options.review_s)
    assert scene.health.trusted("n2")


def test_a_target_whose_probes_are_still_slow_is_ejected_again():
    scene, options = ejected_scene()
    for name in ("n0", "n1", "n3"):
        scene.ask(name, 0.001)
    for _ in range(options.samples):
        assert not scene.health.trusted("n2")
        scene.ask("n2", 0.101)
    scene.clock.advance(options.review_s)
    assert not scene.health.trusted("n2")
    assert scene.ejected == {"n2"}
    assert scene.health.due_for_probe() == []


def test_a_target_readmitted_because_the_pool_shrank_needs_no_probes():
    scene = Scene(4)
    scene.run(2, {"n2": 0.101})
    scene.health.keep(["n1", "n2"])
    assert scene.health.trusted("n2")
