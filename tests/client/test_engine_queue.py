"""The queue ahead of a request: prefill that is left, and loads that begin with the step."""

from holdfast.client.engine_queue import MOVED_TOKENS, EngineQueue, queue_ahead, queues_ahead


def test_what_is_computed_or_loaded_is_not_counted_and_decoding_neither():
    queue = queue_ahead([(1000, 0), (1000, 600), (1000, 1000), (500, 499)], [])
    assert queue.tokens == 1000 + 400
    assert queue.pairs == 1000 * 500 + 400 * (600 + 200)


def test_loads_are_summed_by_tier():
    queue = queue_ahead([], [{"disk": 3, "host": 1}, {"disk": 2}])
    assert queue == EngineQueue(0, 0.0, {"disk": 5, "host": 1})


def test_a_queue_moves_with_many_tokens_or_with_any_load():
    queue = EngineQueue(1000)
    assert not queue.has_moved(EngineQueue(1000 + MOVED_TOKENS - 1))
    assert queue.has_moved(EngineQueue(1000 + MOVED_TOKENS))
    assert queue.has_moved(EngineQueue(1000, 0.0, {"disk": 1}))


def test_each_waiting_request_has_the_prefill_of_all_that_arrived_before_it():
    prefills = [("a", (1000, 0)), ("b", (500, 400)), ("c", (300, 299)), ("d", (700, 0))]
    found = queues_ahead(prefills, {"b", "d"})
    assert found == {
        "b": queue_ahead([(1000, 0)], []),
        "d": queue_ahead([(1000, 0), (500, 400), (300, 299)], []),
    }


def test_a_request_gets_its_turn_with_the_step_that_has_room_for_it():
    queue = EngineQueue(1000, 400_000.0)
    assert queue.before_step(300) == EngineQueue(900, 360_000.0)
    assert queue.before_step(2048) == EngineQueue(0, 0.0)
    assert queue.before_step(0) == queue, "the engine does not say"
    assert EngineQueue().before_step(300) == EngineQueue()
