"""Short loads pass long ones and run beside them; no load is passed without limit."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.load_queue import LoadQueue


def test_a_short_load_runs_beside_a_long_one():
    queue = LoadQueue()
    queue.put(100, "long")
    assert queue.take() == "long"
    queue.put(8, "short")
    assert queue.take() == "short"


def test_a_load_of_similar_size_waits_until_the_running_one_ends():
    queue = LoadQueue()
    queue.put(100, "first")
    queue.put(90, "second")
    assert queue.take() == "second"
    assert queue.take() is None
    queue.done(90)
    assert queue.take() == "first"


def test_equal_loads_run_in_order_of_arrival():
    queue = LoadQueue()
    for number in range(5):
        queue.put(10, number)
    order = []
    while (number := queue.take()) is not None:
        order.append(number)
        queue.done(10)
    assert order == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_later_loads_that_pass_a_load_are_together_no_longer_than_it(later, size):
    queue = LoadQueue()
    queue.put(1, "running")
    assert queue.take() == "running"
    queue.put(size, "long")
    running, passed = 1, 0
    for number, each in enumerate(later):
        queue.put(each, number)
        queue.done(running)
        if (taken := queue.take()) == "long":
            break
        running = later[taken]
        passed += running
    assert passed <= size


@given(st.lists(st.integers(1, 64), min_size=1, max_size=30))
def test_loads_that_run_together_are_less_than_twice_the_largest(sizes):
    queue = LoadQueue()
    for size in sizes:
        queue.put(size, size)
        running = []
        while (taken := queue.take()) is not None:
            running.append(taken)
        for each in running:
            queue.done(each)
        assert sum(running) < 2 * max(running, default=1)
