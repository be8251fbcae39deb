"""A flood waits behind itself, and nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.fair_queue import FairQueue


def taken(queue: FairQueue[str]) -> str:
    """Take a turn; return the work."""
    turn = queue.take()
    assert turn is not None
    return turn[1]


def test_who_may_not_go_waits_without_holding_others_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.put("full", 1.0, "first")
    queue.put("other", 5.0, "second")
    assert queue.take(lambda flow: flow != "full") == ("other", "second")
    assert queue.take(lambda flow: flow != "full") is None
    assert len(queue) == 1
    assert queue.earliest() == 0.0
    assert queue.earliest(lambda flow: flow != "full") == float("inf")
    assert queue.take() == ("full", "first")


def test_a_flood_does_not_delay_a_trickle() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.put("flood", 1.0, "flood")
    queue.put("victim", 1.0, "victim")
    assert "victim" in [taken(queue) for _ in range(2)]


def test_weights_divide_the_device() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(60):
        queue.put("a", 1.0, "a", share=3.0)
        queue.put("b", 1.0, "b", share=1.0)
    first = [taken(queue) for _ in range(40)]
    assert 29 <= first.count("a") <= 31


def test_large_work_counts_as_what_it_is() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.put("large", 8.0, "large")
    for _ in range(160):
        queue.put("small", 1.0, "small")
    first = [taken(queue) for _ in range(45)]
    assert 4 <= first.count("large") <= 6


def test_who_was_idle_saves_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.put("busy", 1.0, "busy")
    for _ in range(90):
        queue.take()
    for _ in range(10):
        queue.put("late", 1.0, "late")
    first = [taken(queue) for _ in range(10)]
    assert 4 <= first.count("late") <= 6


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 100.0)), max_size=60))
def test_everything_comes_once_and_a_flow_in_its_order(work: list[tuple[int, float]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for number, (flow, cost) in enumerate(work):
        queue.put(flow, cost, (flow, number))
    came = []
    while (turn := queue.take()) is not None:
        assert turn[0] == turn[1][0]
        came.append(turn[1])
    assert sorted(number for _, number in came) == list(range(len(work)))
    for flow in range(6):
        own = [number for of, number in came if of == flow]
        assert own == sorted(own)


def test_flows_that_ended_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for flow in range(100):
        queue.put(flow, 1.0, flow)
        queue.take()
    assert not queue._finish
