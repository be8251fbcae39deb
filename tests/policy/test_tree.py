"""Rows are added each with its parent, or not at all."""

import pytest

from holdfast.policy.tree import PrefixTree


@pytest.mark.parametrize(("rows", "parents"), [([0, 1], [-1]), ([0], [-1, 0]), ([], [0])])
def test_rows_and_parents_of_different_numbers_are_refused(rows, parents):
    tree = PrefixTree()
    with pytest.raises(ValueError, match="give a parent per row"):
        tree.add(rows, parents)
    assert tree.rows == tree.holes == 0
    assert not tree.here


def test_removing_a_row_with_children_leaves_a_hole():
    tree = PrefixTree()
    tree.add([0, 1, 2], [-1, 0, 1])
    assert tree.take(1) == 0
    assert (tree.rows, tree.holes) == (2, 1)
    tree.add([1], [0])
    assert (tree.rows, tree.holes) == (3, 0)
    assert [tree.is_leaf(row) for row in range(3)] == [False, False, True]
