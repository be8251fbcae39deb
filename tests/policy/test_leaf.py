"""Leaf-first LRU keeps prefixes whole and forgets what was used longest ago."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.leaf import LeafLru
from holdfast.testing.policy_contract import EvictionContract, EvictionMachine, enter, take


class LeafMachine(EvictionMachine):
    def make(self):
        return LeafLru()


TestLeafMachine = LeafMachine.TestCase


class TestLeafContract(EvictionContract):
    def make(self):
        return LeafLru()


def test_the_chain_used_longest_ago_leaves_first() -> None:
    policy = LeafLru()
    enter(policy, [0, 1])
    enter(policy, [2, 3])
    policy.touch([0, 1], 0.0)
    assert take(policy, 4) == [3, 2, 1, 0]


def test_a_shared_prefix_stays_while_a_branch_is_used() -> None:
    policy = LeafLru()
    enter(policy, [0, 1, 2])
    policy.insert([3], [1], [3], 0.0)
    policy.touch([0, 1, 3], 0.0)
    assert take(policy, 2) == [2, 3]
    assert take(policy, 2) == [1, 0]


def test_victims_the_caller_keeps_stay_in_the_order() -> None:
    policy = LeafLru()
    for row in range(4):
        policy.insert([row], [-1], [row], 0.0)
    assert [row for row, _ in zip(policy.victims(0.0), range(3), strict=False)] == [0, 1, 2]
    assert take(policy, 4) == [0, 1, 2, 3]


def test_a_reused_row_can_be_evicted_before_the_children_of_its_old_block() -> None:
    policy = LeafLru()
    enter(policy, [0, 1])
    policy.remove(0)
    policy.forget(0)
    policy.insert([0], [-1], ["another block"], 0.0)
    assert take(policy, 2) == [1, 0]


uses = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)), max_size=60)


@given(uses)
def test_the_policy_evicts_exactly_the_least_recently_used_leaf(
    steps: list[tuple[int, int, int]],
) -> None:
    """The plain definition: a use stamps every block of its chain; the oldest leaf goes."""
    policy, parents, used = LeafLru(), {}, {}
    for tick, (row, candidate, evict) in enumerate(steps):
        if row not in parents:
            parents[row] = candidate if candidate in parents else -1
            policy.insert([row], [parents[row]], [row], 0.0)
        rows = [row]
        while parents[rows[-1]] >= 0:
            rows.append(parents[rows[-1]])
        policy.touch(rows[::-1], 0.0)
        used.update(dict.fromkeys(rows, tick))
        for victim in take(policy, evict) if evict else []:
            leaves = set(parents) - set(parents.values())
            assert victim in leaves
            assert used[victim] == min(used[leaf] for leaf in leaves)
            del parents[victim]
