"""The gate admits work until it is shut; shutting waits for work in progress."""

import contextlib
import threading

from holdfast.tiers.gate import MediumGate


def test_a_gate_admits_work_until_it_is_shut():
    gate = MediumGate()
    with gate.enter() as first, gate.enter() as second:
        assert (first, second) == (True, True)
    assert not gate.is_shut
    assert gate.shut()
    assert gate.is_shut
    with gate.enter() as late:
        assert not late
    assert not gate.shut()


def test_shutting_waits_for_work_in_progress_and_admits_no_more():
    gate, order = MediumGate(), []

    def shut():
        gate.shut()
        order.append("shut")

    thread = threading.Thread(target=shut)
    with contextlib.ExitStack() as one, contextlib.ExitStack() as other:
        one.enter_context(gate.enter())
        other.enter_context(gate.enter())
        thread.start()
        while not gate.is_shut:
            thread.join(0.001)
        with gate.enter() as late:
            assert not late
        order.append("one out")
        one.close()
        order.append("all out")
        other.close()
        thread.join()
    assert order == ["one out", "all out", "shut"]


def test_work_that_fails_is_no_longer_in_progress():
    gate = MediumGate()
    with contextlib.suppress(OSError), gate.enter():
        raise OSError
    assert gate.shut()
