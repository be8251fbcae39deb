"""A simulated worker begins its prestages in the order of a node."""

from holdfast.plan.prestage import BEGUN_S, LATE_S, PrestageTimes
from holdfast.sim.prestages import WorkerPrestages


def prestages(*times):
    worker = WorkerPrestages()
    for number, each in enumerate(times):
        worker.add(number, PrestageTimes(*each))
    return worker


def test_of_a_slow_tier_one_prestage_is_in_progress_and_late_ones_are_last():
    worker = prestages((1.0, 2.0), (9.0, 2.0), (5.0, 2.0))
    order = []
    for now_s in (0.0, 2.0, 4.0):
        [number] = worker.take(now_s)
        assert worker.take(now_s) == []
        worker.done(number)
        order.append(number)
    assert order == [2, 1, 0]


def test_of_a_fast_tier_several_prestages_begin_together():
    worker = prestages(*[(9.0, 0.6 * BEGUN_S)] * 3)
    assert worker.take(0.0) == [0, 1]
    worker.done(0)
    assert worker.take(0.0) == [2]


def test_a_prestage_that_could_not_begin_for_long_is_dropped():
    worker = prestages((1.0, 2.0), (0.5, 2.0))
    [first] = worker.take(0.0)
    worker.done(first)
    assert worker.take(1.0 + LATE_S) == []
