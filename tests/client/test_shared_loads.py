"""Requests wait for a load of the same blocks, as long as it pays and no longer."""

from types import SimpleNamespace

import pytest

from holdfast.blocks.key import Chain
from holdfast.client.counts import ClientCounts
from holdfast.client.shared_loads import SharedLoads
from holdfast.client.tracked_request import TrackedRequest
from holdfast.testing.played_client import DOMAIN_KEY

BLOCK = 8
DEADLINE_S, LIMIT_S = 0.5, 5.0
PREFIX = list(range(64))


def request(name, tokens, salt=b"", deadline_s=DEADLINE_S):
    live = SimpleNamespace(request_id=name, all_token_ids=tokens, num_tokens=len(tokens))
    chain = Chain(DOMAIN_KEY, b"f" * 16, BLOCK, {0: [salt]} if salt else None)
    tracked = TrackedRequest(live, [chain], [], None)
    tracked.extend()
    tracked.deadline_s = deadline_s
    return tracked


class Rig:
    """Shared loads, and a first request that loads the prefix of 64 tokens."""

    def __init__(self, *, whole=False, loaded=64):
        self.counts = ClientCounts()
        self.loads = SharedLoads(LIMIT_S, self.counts, whole=whole)
        self.loads.begun(request("first", [*PREFIX, 1]), range(loaded))

    def waits(self, tracked, start=0, stop=64, now_s=0.0):
        return self.loads.must_wait(tracked, range(start, stop), now_s)


@pytest.fixture
def rig():
    return Rig()


def test_a_request_waits_for_a_load_of_the_same_blocks(rig):
    second = request("second", [*PREFIX, 2])
    assert rig.waits(second)
    rig.loads.ended("first", landed=True)
    assert not rig.waits(second)


def test_each_request_that_waits_is_counted_once(rig):
    for name in ("second", "third"):
        tracked = request(name, [*PREFIX, 2])
        assert rig.waits(tracked)
        assert rig.waits(tracked, now_s=0.1)
    assert rig.counts.data == {"awaited_loads": 2}


@pytest.mark.parametrize(
    "other",
    [request("second", [7, *PREFIX]), request("second", [*PREFIX, 2], salt=b"tenant")],
    ids=["other tokens", "another salt"],
)
def test_a_request_for_other_blocks_does_not_wait(rig, other):
    assert not rig.waits(other)


def test_a_request_does_not_wait_for_less_than_half_of_what_it_loads(rig):
    other = request("second", [*PREFIX, *range(1000, 1200)])
    assert rig.waits(other, stop=128)
    assert not rig.waits(other, stop=136)


def test_a_request_does_not_wait_for_blocks_that_its_engine_has(rig):
    assert not rig.waits(request("second", [*PREFIX, *range(1000, 1064)]), start=64, stop=128)


def test_with_windows_or_states_a_load_serves_only_requests_that_share_all_of_it():
    shared = request("second", [*PREFIX[:56], *range(1000, 1064)])
    assert Rig(whole=True, loaded=56).waits(shared, stop=56)
    assert not Rig(whole=True, loaded=64).waits(shared, stop=56)
    assert Rig(loaded=64).waits(shared, stop=56)


def test_after_a_load_that_failed_one_of_the_others_loads_next(rig):
    second, third = (request(name, [*PREFIX, 2]) for name in ("second", "third"))
    assert rig.waits(second)
    assert rig.waits(third)
    rig.loads.ended("first", landed=False)
    assert not rig.waits(second)
    rig.loads.begun(second, range(64))
    assert rig.waits(third)


def test_a_request_waits_at_most_for_its_deadline_however_many_loads_fail(rig):
    second = request("second", [*PREFIX, 2])
    assert rig.waits(second)
    rig.loads.ended("first", landed=False)
    rig.loads.begun(request("third", [*PREFIX, 3]), range(64))
    assert rig.waits(second, now_s=0.9 * DEADLINE_S)
    assert not rig.waits(second, now_s=DEADLINE_S)


def test_a_request_whose_plan_has_no_deadline_waits_for_the_longest_load(rig):
    second = request("second", [*PREFIX, 2], deadline_s=0.0)
    assert rig.waits(second)
    assert rig.waits(second, now_s=0.9 * LIMIT_S)
    assert not rig.waits(second, now_s=LIMIT_S)


def test_a_request_that_found_nothing_after_a_load_does_not_wait_for_another(rig):
    second = request("second", [*PREFIX, 2])
    assert rig.waits(second)
    rig.loads.ended("first", landed=True)
    rig.loads.begun(request("third", [*PREFIX, 3]), range(64))
    assert not rig.waits(second)


def test_a_request_that_has_more_tokens_after_a_load_may_wait_for_the_next_one(rig):
    longer = [*PREFIX, *range(1000, 1064)]
    second = request("second", longer)
    assert rig.waits(second, stop=128)
    rig.loads.ended("first", landed=True)
    rig.loads.begun(request("third", longer), range(64, 128))
    assert rig.waits(second, start=64, stop=128, now_s=2 * DEADLINE_S)


def test_no_request_waits_after_the_loads_are_forgotten(rig):
    rig.loads.clear()
    assert not rig.waits(request("second", [*PREFIX, 2]))
