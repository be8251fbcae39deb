"""S3-FIFO lets pass what is used once and keeps what came back."""

from holdfast.policy.s3fifo import S3Fifo
from holdfast.testing.policy_contract import EvictionContract, EvictionMachine, take


class S3FifoMachine(EvictionMachine):
    def make(self):
        return S3Fifo()


TestS3FifoMachine = S3FifoMachine.TestCase


class TestS3FifoContract(EvictionContract):
    def make(self):
        return S3Fifo()


def test_a_scan_does_not_evict_blocks_used_twice():
    policy = S3Fifo()
    for row in range(20):
        policy.insert([row], [-1], [row], 0.0)
    for _ in range(2):
        policy.touch([3], 0.0)
        policy.touch([7], 0.0)
    assert take(policy, 17) == [row for row in range(19) if row not in (3, 7)]


def test_a_block_evicted_recently_enters_the_main_queue():
    policy = S3Fifo()
    for row in range(20):
        policy.insert([row], [-1], [f"name {row}"], 0.0)
    assert take(policy, 1) == [0]
    policy.insert([0], [-1], ["name 0"], 0.0)
    assert take(policy, 18) == list(range(1, 19))


def test_a_parent_is_evicted_directly_after_its_last_child():
    policy = S3Fifo()
    policy.insert([0], [-1], [0], 0.0)
    policy.insert([5], [-1], [5], 0.0)
    policy.insert([1], [0], [1], 0.0)
    policy.insert([2], [0], [2], 0.0)
    assert take(policy, 4) == [5, 1, 2, 0]
