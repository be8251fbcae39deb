"""Which waiting requests are announced, in which order, and how often."""

from holdfast.client.queued_requests import AGAIN_S, QueuedRequests


def queued(*request_ids):
    requests = QueuedRequests()
    for request_id in request_ids:
        requests.arrived(request_id)
    return requests


def test_the_newest_request_is_announced_first():
    requests = queued("a", "b", "c")
    assert requests.due(0.0) == ["a", "b", "c"]
    assert requests.announce({"a": b"1", "b": b"2", "c": b"3"}, 0.0) == ["c", "b", "a"]
    assert requests.due(0.0) == []


def test_requests_with_one_context_are_announced_once_for_the_oldest_of_them():
    requests = queued("a", "b", "c")
    assert requests.announce({"a": b"1", "b": b"1", "c": b"2"}, 0.0) == ["c", "a"]
    assert all(requests.take_announced(request_id) for request_id in ("a", "b", "c"))
    requests.arrived("d")
    assert requests.announce({"d": b"1"}, 1.0) == []
    assert requests.due(AGAIN_S) == ["a", "b", "c", "d"]
    assert requests.announce({"b": b"1", "d": b"1"}, AGAIN_S) == ["b"]


def test_a_request_that_left_is_not_announced():
    requests = queued("a", "b")
    requests.announce({"a": b"1"}, 0.0)
    requests.left("a")
    requests.left("b")
    assert requests.due(2 * AGAIN_S) == []
    assert not requests.take_announced("a")
