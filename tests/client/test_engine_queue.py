"""The queue ahead of a request: prefill that is left, and loads that begin with the step."""

from holdfast.client.engine_queue import MOVED_TOKENS, EngineQueue, queue_ahead


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
