"""Leaf-first LRU keeps prefixes whole and forgets what was used longest ago."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.leaf import LeafLru


def take(policy: LeafLru, parents: dict[int, int], count: int) -> list[int]:
    taken = []
    for row in policy.victims():
        policy.remove(row, parents[row])
        taken.append(row)
        if len(taken) == count:
            break
    return taken


def chain(policy: LeafLru, rows: list[int], parents: dict[int, int]) -> None:
    parents.update(zip(rows, [-1, *rows], strict=False))
    for row in reversed(rows):
        policy.insert(row, parents[row])


def test_a_chain_leaves_from_its_end() -> None:
    policy, parents = LeafLru(), {}
    chain(policy, [0, 1, 2, 3], parents)
    assert take(policy, parents, 4) == [3, 2, 1, 0]


def test_the_chain_used_longest_ago_leaves_first() -> None:
    policy, parents = LeafLru(), {}
    chain(policy, [0, 1], parents)
    chain(policy, [2, 3], parents)
    policy.touch([0, 1])
    assert take(policy, parents, 4) == [3, 2, 1, 0]


def test_a_shared_prefix_stays_while_a_branch_is_used() -> None:
    policy, parents = LeafLru(), {}
    chain(policy, [0, 1, 2], parents)
    parents[3] = 1
    policy.insert(3, 1)
    policy.touch([0, 1, 3])
    assert take(policy, parents, 2) == [2, 3]
    assert take(policy, parents, 2) == [1, 0]


def test_victims_the_caller_keeps_stay_in_the_order() -> None:
    policy, parents = LeafLru(), {}
    for row in range(4):
        parents[row] = -1
        policy.insert(row, -1)
    assert [row for row, _ in zip(policy.victims(), range(3), strict=False)] == [0, 1, 2]
    assert take(policy, parents, 4) == [0, 1, 2, 3]


def test_removing_an_unknown_row_changes_nothing() -> None:
    policy = LeafLru()
    policy.remove(7, -1)
    policy.insert(0, -1)
    policy.remove(7, 0)
    assert list(policy.victims()) == [0]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_never_evicts_a_block_before_its_children(steps: list[tuple[int, int]]) -> None:
    policy, parents = LeafLru(), {}
    for row, candidate in steps:
        if row in parents:
            policy.touch([row])
            continue
        parents[row] = candidate if candidate in parents else -1
        policy.insert(row, parents[row])
    order = take(policy, parents, len(parents))
    assert sorted(order) == sorted(parents)
    gone = set()
    for row in order:
        gone.add(row)
        children = {child for child, parent in parents.items() if parent == row}
        assert children <= gone
