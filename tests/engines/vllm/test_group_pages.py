"""Which pages a block has in vLLM's lists, and which of them a load fills."""

import pytest

pytest.importorskip("vllm")

from holdfast.blocks.group_rules import GroupRule
from holdfast.devices.base import NO_PAGE
from holdfast.engines.vllm.group_pages import GroupShape
from holdfast.errors import BlockError

PAGE = 16
FULL = GroupShape(GroupRule("full", 0, 2 * PAGE, 2 * PAGE), PAGE, (0,))
WINDOW = GroupShape(GroupRule("window", 20, 2 * PAGE, 2 * PAGE), PAGE, (1, 2))
STATE = GroupShape(GroupRule("recurrent", 0, PAGE, PAGE), PAGE, (1, 2))
LISTS = [10, 11, 12, 13, 14, 15], [0, 0, 0, 23, 24, 25], [0, 0, 0, 33, 34, 35]


def test_a_block_has_the_pages_of_each_list_after_those_of_the_one_before():
    blocks, pages = WINDOW.load_pages(LISTS, 96, 0)
    assert blocks == range(2, 3)
    assert pages == [24, 25, 34, 35]


def test_pages_that_vllm_has_put_aside_are_left_out():
    narrow = WINDOW._replace(rule=WINDOW.rule._replace(window=16))
    blocks, pages = narrow.load_pages(LISTS, 64, 0)
    assert blocks == range(1, 2)
    assert pages == [NO_PAGE, 23, NO_PAGE, 33]


def test_pages_that_the_engine_holds_are_left_out():
    blocks, pages = FULL.load_pages(LISTS, 64, 48)
    assert blocks == range(1, 2)
    assert pages == [NO_PAGE, 13]


@pytest.mark.parametrize(("shape", "tokens"), [(FULL, 128), (WINDOW, 64), (STATE, 48)])
def test_a_resume_for_which_vllm_has_no_page_is_refused(shape, tokens):
    lists = LISTS if shape is FULL else ([], [10, 0, 0, 13], [10, 11, 0, 13])
    with pytest.raises(BlockError, match="vLLM has no page"):
        shape.load_pages(lists, tokens, 0)


def test_a_state_is_loaded_into_the_page_of_its_block():
    blocks, pages = STATE.load_pages(LISTS, 96, 32)
    assert blocks == range(5, 6)
    assert pages == [25, 35]


def test_blocks_without_all_of_their_pages_are_not_saved():
    assert list(WINDOW.save_runs(LISTS, range(3))) == [(range(2, 3), [24, 25, 34, 35])]
    assert list(FULL.save_runs(LISTS, range(1, 4))) == [(range(1, 3), [12, 13, 14, 15])]
    gap = [10, 11, 0, 13, 14, 15]
    assert list(FULL.save_runs([gap], range(3))) == [
        (range(1), [10, 11]),
        (range(2, 3), [14, 15]),
    ]


@pytest.mark.parametrize(
    ("offered", "found"),
    [
        ([(1, 5, 32), (2, 6, 32)], [(1, [5, 6])]),
        ([(2, 6, 32), (1, 5, 32), (1, 7, 48), (2, 8, 48)], [(1, [5, 6]), (2, [7, 8])]),
        ([(1, 5, 32)], []),
        ([(1, 5, 32), (2, 6, 48)], []),
        ([(1, 5, 33), (2, 6, 33)], []),
        ([(1, 0, 32), (2, 6, 32)], []),
        ([(0, 5, 32), (1, 5, 32), (2, 6, 32)], [(1, [5, 6])]),
    ],
    ids=["one", "two", "a list missing", "other tokens", "in a block", "null page", "other group"],
)
def test_a_state_is_saved_if_every_list_offers_it_at_the_end_of_a_block(offered, found):
    assert list(STATE.states(offered)) == found
