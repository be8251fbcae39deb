"""The gate admits work until it is shut; shutting waits for work in progress."""

import threading

from holdfast.tiers.gate import MediumGate


def test_it_admits_work_until_it_is_shut():
    gate = MediumGate()
    assert gate.enter()
    assert gate.enter()
    gate.leave()
    gate.leave()
    assert not gate.is_shut
    assert gate.shut()
    assert gate.is_shut
    assert not gate.enter()
    assert not gate.shut()


def test_shutting_waits_for_work_in_progress_and_admits_no_more():
    gate, order = MediumGate(), []
    gate.enter()
    gate.enter()

    def shut():
        gate.shut()
        order.append("shut")

    thread = threading.Thread(target=shut)
    thread.start()
    while not gate.is_shut:
        thread.join(0.001)
    assert not gate.enter()
    order.append("one out")
    gate.leave()
    order.append("all out")
    gate.leave()
    thread.join()
    assert order == ["one out", "all out", "shut"]
