"""Cost-aware eviction: LRU without hints, nearly the oracle with them."""

from holdfast.policy.base import NEVER
from holdfast.policy.cost_aware import CostAware
from holdfast.testing.policy_contract import EvictionContract, EvictionMachine, enter, take


class CostMachine(EvictionMachine):
    def make(self):
        return CostAware()


class WeighedMachine(EvictionMachine):
    def make(self):
        policy = CostAware()
        policy.weigh_by(lambda row: 4.0 ** (row % 3))
        return policy


TestCostMachine = CostMachine.TestCase
TestWeighedMachine = WeighedMachine.TestCase


class TestCostContract(EvictionContract):
    def make(self):
        return CostAware()


def test_blocks_never_expected_again_are_evicted_first_and_soon_expected_ones_last():
    policy = CostAware()
    for at, rows in enumerate(([0, 1], [2, 3], [4, 5], [6, 7])):
        enter(policy, rows, float(at))
    policy.expect([0, 1], 11.0)
    policy.expect([4, 5], NEVER)
    policy.expect([6, 7], 500.0)
    assert take(policy, 8, 10.0) == [5, 4, 7, 6, 3, 2, 1, 0]


def test_a_hint_that_proved_wrong_ages_like_a_use_at_that_time():
    policy = CostAware()
    enter(policy, [0], 0.0)
    enter(policy, [1], 40.0)
    policy.expect([0], 30.0)
    assert take(policy, 2, 100.0) == [0, 1]


def test_a_use_ends_the_expectation_of_a_block():
    policy = CostAware()
    enter(policy, [0], 0.0)
    enter(policy, [1], 1.0)
    policy.expect([0], NEVER)
    policy.touch([0], 2.0)
    assert take(policy, 2, 3.0) == [1, 0]


def test_a_closed_session_leaves_a_shared_prefix_to_other_sessions():
    policy = CostAware()
    enter(policy, [0, 1], 0.0)
    policy.insert([2], [0], [2], 1.0)
    enter(policy, [3], 2.0)
    policy.expect([0, 1], 12.0)
    policy.expect([0, 2], NEVER)
    assert take(policy, 4, 10.0) == [2, 3, 1, 0]


def test_a_shared_prefix_is_kept_longer_than_the_rest_of_closed_sessions():
    policy = CostAware()
    enter(policy, [3], 0.0)
    enter(policy, [0, 1], 1.0)
    policy.insert([2], [0], [2], 2.0)
    policy.expect([0, 1], NEVER)
    policy.expect([0, 2], NEVER)
    assert sorted(take(policy, 2, 10.0)) == [1, 2]
    assert take(policy, 2, 10.0) == [3, 0]


def test_a_block_used_long_before_its_expected_time_counts_as_shared():
    policy = CostAware()
    enter(policy, [0], 0.0)
    enter(policy, [1], 0.0)
    policy.expect([0], 100.0)
    policy.touch([0], 5.0)
    policy.expect([0], NEVER)
    assert take(policy, 2, 6.0) == [1, 0]


def test_a_reused_row_keeps_no_history_of_its_previous_block():
    policy = CostAware()
    enter(policy, [0], 0.0)
    policy.expect([0], 100.0)
    policy.touch([0], 5.0)
    policy.remove(0)
    policy.forget(0)
    enter(policy, [1, 0], 6.0)
    enter(policy, [2], 1.0)
    policy.expect([1, 0], NEVER)
    assert take(policy, 3, 7.0) == [0, 1, 2]


def test_a_shared_prefix_is_kept_for_the_session_that_returns():
    policy = CostAware()
    enter(policy, [0, 1], 0.0)
    policy.insert([2], [0], [2], 1.0)
    enter(policy, [3], 2.0)
    policy.expect([0, 1], 12.0)
    policy.expect([0, 2], NEVER)
    policy.remove(1)
    assert take(policy, 3, 10.0) == [2, 3, 0]


def test_a_more_valuable_block_stays_longer():
    policy = CostAware()
    policy.weigh_by({0: 8.0, 1: 1.0}.__getitem__)
    enter(policy, [0], 0.0)
    enter(policy, [1], 70.0)
    assert take(policy, 1, 76.0) == [0], "76 s at 8 are more than 6 s at 1"
    enter(policy, [0], 80.0)
    assert take(policy, 1, 120.0) == [1], "40 s at 8 are less than 50 s at 1"


def test_a_block_used_sooner_than_expected_ages_from_that_use():
    policy = CostAware()
    enter(policy, [0], 0.0)
    policy.expect([0], 1_000.0)
    assert list(policy.victims(5.0)) == [0]
    policy.touch([0], 10.0)
    enter(policy, [1], 20.0)
    assert take(policy, 2, 30.0) == [0, 1]


def test_a_skipped_victim_moves_behind_the_others_and_keeps_its_hint() -> None:
    policy = CostAware()
    for row in range(3):
        policy.insert([row], [-1], [row], float(row))
    policy.expect([1], NEVER)
    for row in (0, 1):
        policy.pass_by(row, 5.0)
    assert list(policy.victims(6.0)) == [1, 2, 0]
