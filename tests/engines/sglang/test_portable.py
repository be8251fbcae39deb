"""Portable pages: SGLang and other programs find by tokens what the others saved."""

import numpy as np
import pytest
import torch
from sglang_stubs import UTILS, HostPool, MLATokenToKVPoolHost, indices

import holdfast
from holdfast.blocks.key import Chain
from holdfast.client.engine import EngineGroup, Loaded, Saved
from holdfast.engines.sglang.page_names import PageNames
from holdfast.engines.sglang.portable_pool import HostPoolPages, PortablePool, portable_layout
from holdfast.errors import ConfigError, Outcome
from holdfast.named_blocks import PrefixPosition
from holdfast.testing.embedded import fingerprint_for
from holdfast_bench.harness import model

TOKENS = [*range(500, 523)]
"""Five whole pages of four tokens, and a part of one."""


@pytest.fixture
def session(node, tmp_path):
    """A session of a program that has the same model, named as the servers of `sglang` are."""
    layout = portable_layout(HostPool())
    named = holdfast.portable_fingerprint(model.make("tiny"), layout, name=str(tmp_path))
    with holdfast.open(node.address, domain="default") as store:
        yield store.session(named)


def portable(pool, number):
    """Return the portable bytes of a page, said plainly: layer, keys and values, head, token."""
    page = pool.kv_buffer[:, number]  # keys and values, layer, token, head, dim
    return page.permute(1, 0, 3, 2, 4).contiguous().numpy()


def pool_of_layout(layout, seed):
    """Return a pool of another layout with the content of `HostPool().fill(seed)`."""
    pool, source = HostPool(), HostPool().fill(seed).kv_buffer
    pool.layout = layout
    kinds, _, layers, _, heads, size = source.shape
    if layout == "page_first":
        moved = source.permute(0, 1, 3, 2, 4, 5).reshape(kinds, -1, layers, heads, size)
    elif layout == "layer_first":
        moved = source.permute(0, 2, 1, 3, 4, 5).reshape(kinds, layers, -1, heads, size)
    else:
        moved = source.permute(0, 1, 4, 3, 2, 5)
    pool.kv_buffer = moved.contiguous()
    return pool


def names(tokens, prior=None):
    return UTILS.get_hash_str(tokens, prior, 4)


def test_a_program_finds_by_tokens_what_sglang_saved(sglang, session):
    pool = HostPool().fill(1)
    storage = sglang.storage(pool, layout="portable")
    keys = names(TOKENS)[:5]
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys[:2], indices([3, 7])) == [True, True]
    assert storage.batch_set_v1(keys[2:5], indices([0, 1, 2])) == [True] * 3
    assert session.cover(TOKENS) == 20
    found = np.zeros((5, 2, 2, 2, 4, 4), np.float32)
    assert session.fetch(TOKENS, into=found).blocks == 5
    for row, page in zip(found, (3, 7, 0, 1, 2), strict=True):
        assert (row == portable(pool, page)).all()


def test_sglang_finds_what_a_program_saved_by_tokens(sglang, session):
    source, pool = HostPool().fill(2), HostPool()
    session.save(TOKENS, np.stack([portable(source, page) for page in range(5)]))
    storage = sglang.storage(pool, layout="portable")
    keys = names(TOKENS)
    assert storage.batch_exists(keys) == 5
    assert storage.batch_get_v1(keys[1:5], indices([8, 9, 10, 11])) == [True] * 4
    for at in range(4):
        assert pool.kv_buffer[:, 8 + at].equal(source.kv_buffer[:, 1 + at])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
def test_every_layout_of_the_host_pool_is_the_same_portable_block(sglang, layout):
    pool, other = HostPool().fill(3), pool_of_layout(layout, 3)
    written = sglang.storage(other, layout="portable")
    keys = names(TOKENS)[:3]
    assert written.batch_set_v1(keys, indices([4, 5, 6])) == [True] * 3
    reader = HostPool()
    assert sglang.storage(reader, layout="portable").batch_get_v1(keys, indices([0, 1, 2])) == (
        [True] * 3
    )
    assert reader.kv_buffer[:, 0].equal(pool.kv_buffer[:, 4])
    back = pool_of_layout(layout, 0)
    assert sglang.storage(back, layout="portable").batch_get_v1(keys, indices([4, 5, 6])) == (
        [True] * 3
    )
    assert torch.equal(*(pages_of_layout(one, layout) for one in (back, other)))


def pages_of_layout(pool, layout):
    """Return pages 4 to 6 in a pool of this layout."""
    if layout == "layer_first":
        return pool.kv_buffer[:, :, 16:28]
    return pool.kv_buffer[:, 16:28] if layout == "page_first" else pool.kv_buffer[:, 4:7]


def test_pages_are_named_from_the_middle_of_a_context(sglang):
    sglang.storage(layout="portable")
    whole = names(TOKENS)
    assert names(TOKENS[8:], whole[1]) == whole[2:]
    assert len(whole) == 6  # the last one names a part of a page


def test_a_request_with_a_salt_keeps_sglangs_names_and_is_not_stored(sglang):
    storage, seed = sglang.storage(layout="portable"), "ab" * 32
    salted = names(TOKENS, seed)
    assert {len(name) for name in salted} == {64}
    assert storage.batch_exists(salted[:2]) == 0
    assert storage.batch_set_v1(salted[:2], indices([0, 1])) == [False, False]


def test_pages_that_do_not_follow_each_other_are_not_saved(sglang):
    storage = sglang.storage(HostPool().fill(1), layout="portable")
    keys = names(TOKENS)
    assert storage.batch_set_v1([keys[0], keys[2]], indices([0, 1])) == [False, False]
    assert storage.batch_set_v1(["00" * 16], indices([0])) == [False]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": {"tp_size": 2}}, "more than one rank"),
        ({"config": {"is_mla_model": True}, "pool": MLATokenToKVPoolHost()}, "latent KV"),
        ({"arguments": {"kv_cache_dtype": "fp8_e4m3"}}, "a quantised KV cache"),
        ({"arguments": {"quantization": "fp8"}}, "quantization"),
        ({"arguments": {"kt_weight_path": "/experts"}}, "kt_weight_path"),
        ({"arguments": {"dllm_algorithm": "LowConfidence"}}, "dllm_algorithm"),
        ({"arguments": {"forward_hooks": [{"hook_factory": "steer.make"}]}}, "forward_hooks"),
        ({"arguments": {"speculative_algorithm": "EAGLE"}}, "speculative decoding"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"images": True, "multimodal": True}, "images, for which SGLang has numbers"),
        (
            {"arguments": {"json_model_override_args": '{"rope_scaling": {"long_factor": [1]}}'}},
            "LongRoPE",
        ),
        ({"tree_core": "rust"}, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python"),
    ],
)
def test_what_has_no_portable_form_is_refused_in_one_sentence(sglang, changes, named):
    with pytest.raises(ConfigError, match=named):
        sglang.storage(layout="portable", **changes)


class Unhurried:
    """An engine client whose loads and saves have not ended when a wait for them is over."""

    groups = (EngineGroup(fingerprint_for(portable_layout(HostPool()), "unhurried")),)

    def __init__(self, result):
        self.result, self.waits = result, 0

    def load(self, *_):
        return self

    save = load

    def wait(self, timeout_s):
        self.waits += 1
        return self.result if self.waits > 3 else None


@pytest.mark.parametrize(
    ("verb", "result"),
    [("load", Loaded(12, {}, Outcome.OK, "")), ("save", Saved(3, Outcome.OK))],
)
def test_pages_are_not_given_back_while_they_are_copied(verb, result):
    """SGLang uses them for something else after the call."""
    page_names = PageNames(lambda: Chain(bytes(32), bytes(16), 4))
    keys = page_names.name(None, TOKENS[:12], None, 4)
    pool = PortablePool(HostPoolPages(HostPool()), Unhurried(result), page_names)
    how = 5.0 if verb == "load" else PrefixPosition()
    assert getattr(pool, verb)(keys, indices([0, 1, 2]), how) == [True] * 3


def test_a_second_pool_is_refused(sglang):
    storage = sglang.storage(layout="portable")
    with pytest.raises(ConfigError, match="the model has a pool swa beside its KV pool"):
        storage.register_mem_host_pool_v2(HostPool(), "swa")
