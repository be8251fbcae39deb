"""When blocks are saved: in the step that fills them, or before vLLM uses their pages."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from holdfast.client.save_choice import PROMPTS_MIN

BLOCK, BLOCKS = 8, 4
PAGES = 64


class Engine:
    """A scheduler side that chooses when to save, and vLLM's own pool of pages."""

    def __init__(self, fakes, save):
        setting = fakes.setting(save=save, step_tokens_max=BLOCK)
        self.rig = fakes.SchedulerRig(fakes, setting=setting)
        self.pool = BlockPool(PAGES, enable_caching=True, hash_block_size=BLOCK)
        self.rig.side.watch_pages(self.pool, BLOCKS * BLOCK)
        self.count = 0

    def serve(self, *, local=0, loaded=0):
        """Serve a request with so many tokens from each source; return how many blocks it saves."""
        self.count += 1
        rig, name = self.rig, f"r{self.count}"
        rig.held = (local + loaded) // BLOCK
        request = rig.request(BLOCKS * BLOCK + 1, request_id=name, cache_salt=name)
        tokens, _ = rig.side.matched_tokens(request, local)
        pages = self.pool.get_new_blocks(BLOCKS)
        for number, page in enumerate(pages):
            key = (1000 * self.count + number).to_bytes(16, "big")
            page.set_block_hash(make_block_hash_with_group_id(key, 0))
        numbers = [page.block_id for page in pages]
        rig.side.allocated(request, (numbers,), tokens)
        if tokens:
            rig.side.build_work(rig.fakes.step({}))
            rig.side.on_worker_output(rig.fakes.outcome([name]))
        request.num_computed_tokens = local + tokens
        work = rig.run(request, request.num_tokens - request.num_computed_tokens, numbers)
        rig.side.on_finished(request)
        self.pool.free_blocks(reversed(pages))
        return sum(len(save.keys[0]) // 16 for save in work.saves if save.request == name)


@pytest.mark.parametrize(("save", "now"), [("when_full", BLOCKS), ("before_eviction", 0)])
def test_the_option_says_when_blocks_are_saved(fakes, save, now):
    assert Engine(fakes, save).serve() == now


def test_auto_defers_saves_once_prompts_find_their_blocks_in_vllm(fakes, caplog):
    engine = Engine(fakes, "auto")
    assert engine.serve() == BLOCKS
    with caplog.at_level("INFO", "vllm.holdfast"):
        for _ in range(PROMPTS_MIN):
            engine.serve(local=3 * BLOCK)
    assert engine.serve() == 0
    assert "saved before vLLM uses their pages" in caplog.text


def test_auto_saves_at_once_while_prompts_find_their_blocks_in_the_store(fakes):
    engine = Engine(fakes, "auto")
    for _ in range(2 * PROMPTS_MIN):
        engine.serve(loaded=3 * BLOCK)
    assert engine.serve() == BLOCKS


def test_auto_saves_at_once_again_when_the_load_changes(fakes):
    engine = Engine(fakes, "auto")
    for _ in range(PROMPTS_MIN):
        engine.serve(local=3 * BLOCK)
    assert engine.serve() == 0
    for _ in range(PROMPTS_MIN):
        engine.serve(loaded=3 * BLOCK)
    assert engine.serve() == BLOCKS


@pytest.mark.parametrize(("local", "saves"), [(0, 1), (8, 0)])
def test_a_request_that_begins_with_pages_whose_hash_may_collide_is_not_saved(fakes, local, saves):
    """The pages may be of other tokens, and all later KV is computed from them."""
    harness = fakes.SchedulerRig(fakes, setting=fakes.setting(trusts_pages=False))
    request = harness.request(20)
    assert harness.side.matched_tokens(request, local) == (0, False)
    request.num_computed_tokens = local
    assert len(harness.run(request, 20 - local, [1, 2, 3]).saves) == saves
