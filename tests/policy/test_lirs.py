"""LIRS keeps what came back soon, and remembers the names of what did not stay."""

from holdfast.policy.lirs import Lirs
from holdfast.testing.policy_contract import EvictionContract, EvictionMachine, take


class LirsMachine(EvictionMachine):
    def make(self):
        return Lirs()


TestLirsMachine = LirsMachine.TestCase


class TestLirsContract(EvictionContract):
    def make(self):
        return Lirs()


def full(count):
    policy = Lirs()
    for row in range(count):
        policy.insert([row], [-1], [f"name {row}"], 0.0)
    assert take(policy, 1) == [0]
    return policy


def test_a_scan_leaves_the_low_set_alone():
    policy = full(100)
    gone = []
    for number in range(100, 150):
        policy.insert([number], [-1], [f"name {number}"], 0.0)
        gone += take(policy, 1)
    assert gone == list(range(100, 150))


def test_a_block_that_returns_soon_enters_the_low_set():
    policy = full(100)
    policy.insert([100], [-1], ["soon"], 0.0)
    assert take(policy, 1) == [100]
    policy.insert([100], [-1], ["soon"], 0.0)
    assert take(policy, 2) == [1, 2]
