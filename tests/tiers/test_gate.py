"""The gate: in until it shuts, and shut only when all are out."""

import threading

from holdfast.tiers.gate import Gate


def test_it_lets_in_until_it_is_shut():
    gate = Gate()
    assert gate.enter()
    assert gate.enter()
    gate.leave()
    gate.leave()
    assert not gate.is_shut
    assert gate.shut()
    assert gate.is_shut
    assert not gate.enter()
    assert not gate.shut()


def test_shutting_waits_for_all_inside_and_lets_nobody_in_meanwhile():
    gate, order = Gate(), []
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
