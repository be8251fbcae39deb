"""What peers ask by name: one peer does not hold up the requests of others."""

from collections import Counter

import pytest

from holdfast.policy.cost_aware import CostAware
from holdfast.store import peer_requests

BLOCKS = 6


class CountingLock:
    """A lock that counts how often it was taken."""

    def __init__(self, lock):
        self.lock, self.taken = lock, 0

    def __enter__(self):
        self.lock.acquire()
        self.taken += 1

    def __exit__(self, *_):
        self.lock.release()


class RecordingPolicy(CostAware):
    """Notes each block that is used."""

    def __init__(self):
        super().__init__()
        self.touched = []

    def touch(self, rows, now_s):
        self.touched += rows
        super().touch(rows, now_s)


@pytest.fixture
def policy():
    return RecordingPolicy()


@pytest.fixture
def one(harness, policy):
    """A store that has a chain of `BLOCKS`."""
    one = harness(make_eviction=lambda: policy)
    one.save(one.chain(1, BLOCKS))
    policy.touched.clear()
    return one


def test_a_message_of_a_peer_takes_the_lock_for_a_few_of_its_blocks_at_a_time(
    one, policy, monkeypatch
):
    monkeypatch.setattr(peer_requests, "KEYS_AT_ONCE", 2)
    table, touches = one.store.table, Counter()
    table.lock = lock = CountingLock(table.lock)
    touch = policy.touch

    def counted(rows, now_s):
        touches[lock.taken] += len(rows)
        touch(rows, now_s)

    monkeypatch.setattr(policy, "touch", counted)
    assert one.store.use(one.namespace, one.chain(1, BLOCKS).keys) == BLOCKS
    assert (sum(touches.values()), max(touches.values())) == (BLOCKS, 2)
    before = lock.taken
    assert one.store.held(one.namespace, one.chain(1, BLOCKS).keys) == bytes([1] * BLOCKS)
    assert lock.taken - before == BLOCKS // 2


def test_a_block_that_a_message_names_again_and_again_is_used_once(one, policy):
    keys = one.chain(1, BLOCKS).keys
    assert one.store.use(one.namespace, [keys[0]] * 500 + [keys[1], b"x" * 16]) == 2
    assert len(policy.touched) == 2
