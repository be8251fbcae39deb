"""Deferred blocks are saved when vLLM is about to use their pages, with those before them."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from holdfast.client.tasks import SaveTask
from holdfast.engines.vllm.deferred_saves import DeferredSaves

PAGES = 13
"""Pages of the pool; vLLM takes the first one for itself."""


def key(number):
    return (number + 1000).to_bytes(16, "big")


class Engine:
    """vLLM's own pool of pages, and the blocks of its requests, one page each."""

    def __init__(self, watched=2, most=64):
        self.pool = BlockPool(PAGES, enable_caching=True, hash_block_size=16)
        self.saves = DeferredSaves(self.pool, watched, most)

    def compute(self, first, count, group=0):
        """Fill blocks `first` and following of one context, and end the request."""
        pages = self.pool.get_new_blocks(count)
        for number, page in enumerate(pages, first):
            page.set_block_hash(make_block_hash_with_group_id(key(number), group))
            save = SaveTask(
                "r", (key(number),), (key(number - 1),), (b"segment",), number, [page.block_id],
                group=group,
            )  # fmt: skip
            assert self.saves.put(save)
        self.pool.free_blocks(reversed(pages))
        return pages

    def due(self):
        """Return the first and the last block of each save, and its pages."""
        return [
            (save.depth, save.depth + len(save.keys[0]) // 16 - 1, save.pages)
            for save in self.saves.due()
        ]


def test_nothing_is_saved_while_the_engine_has_pages_that_hold_nothing():
    engine = Engine()
    engine.compute(0, 4)
    assert engine.due() == []


def test_a_context_is_saved_whole_when_the_engine_is_about_to_use_a_page_of_it():
    engine = Engine()
    pages = engine.compute(0, 4)
    engine.compute(100, 7)
    assert engine.due() == [(0, 3, [page.block_id for page in pages])]
    assert engine.due() == []
    assert engine.saves.lost == 0


def test_a_block_that_is_used_again_is_not_saved_before_it_is_unused_for_longest():
    engine = Engine()
    first = engine.compute(0, 4)
    second = engine.compute(100, 4)
    engine.pool.touch(first)
    engine.pool.free_blocks(reversed(first))
    engine.pool.free_blocks(reversed(engine.pool.get_new_blocks(4)))
    engine.compute(200, 4)
    assert engine.due() == [(100, 103, [page.block_id for page in second])]


def test_blocks_whose_pages_were_used_before_they_were_saved_are_lost_and_counted():
    engine = Engine(watched=1)
    engine.compute(0, 6)
    engine.compute(100, 12)
    assert engine.saves.lost == 6
    engine.compute(200, 1)
    assert [(first, last) for first, last, _ in engine.due()] == [(100, 110)]
    assert engine.saves.lost == 7


def test_a_page_that_vllm_keeps_no_hash_of_is_saved_at_once():
    engine = Engine()
    (page,) = engine.pool.get_new_blocks(1)
    save = SaveTask("r", (key(0),), (key(9),), (b"segment",), 0, [page.block_id])
    assert not engine.saves.put(save)


def test_a_block_that_two_requests_share_is_saved_once():
    engine = Engine(watched=20)
    (page,) = engine.compute(0, 1)
    save = SaveTask("other", (key(0),), (key(9),), (b"segment",), 0, [page.block_id])
    assert engine.saves.put(save)
    assert len(engine.due()) == 1


def test_blocks_of_two_groups_on_the_same_pages_are_both_saved():
    engine = Engine(watched=20)
    pages = [page.block_id for page in engine.compute(0, 2)]
    for number, page in enumerate(pages):
        save = SaveTask(
            "r", (key(number),), (key(number - 1),), (b"segment",), number, [page], group=1
        )
        assert engine.saves.put(save)
    assert engine.saves.lost == 0
    saved = engine.saves.due()
    assert sorted((save.group, save.pages) for save in saved) == [(0, pages), (1, pages)]


def test_a_save_has_no_more_blocks_than_is_permitted():
    engine = Engine(watched=20, most=4)
    engine.compute(0, 10)
    assert sorted((first, last) for first, last, _ in engine.due()) == [(0, 3), (4, 7), (8, 9)]


def test_after_a_reset_nothing_that_was_deferred_is_saved():
    engine = Engine(watched=20)
    engine.compute(0, 4)
    engine.saves.clear()
    assert engine.due() == []
