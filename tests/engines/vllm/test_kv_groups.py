"""The KV groups of models, and where their pages are."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from described_engine import (
    HEAD_SIZE,
    HEADS,
    PAGES,
    TOKENS,
    config_of,
    groups_of,
    spec_of,
    tensors_of,
)
from vllm.v1 import kv_cache_interface as kv

from holdfast.blocks.fingerprint import KvGroup
from holdfast.engines import cached_models
from holdfast.engines.cached_models import Caching
from holdfast.engines.vllm.kv_groups import (
    geometry_of,
    model_kind,
    paged_groups,
    why_not_cached,
)
from holdfast.engines.vllm.unsupported import UnsupportedError


@pytest.fixture
def group():
    (group,) = paged_groups(config_of(), groups_of(spec_of()), tensors_of())
    return group


@pytest.mark.parametrize(
    ("config", "groups", "named"),
    [
        (config_of(), groups_of(object()), "2 of object.*does not know these pages"),
        (config_of(), groups_of(spec_of(non_causal=True)), "later tokens"),
        (
            config_of(parallel_config=SimpleNamespace(decode_context_parallel_size=2)),
            groups_of(spec_of()),
            "decode_context_parallel_size 2",
        ),
        (
            config_of(cache_config=SimpleNamespace(calculate_kv_scales=True)),
            groups_of(spec_of()),
            "calculate_kv_scales",
        ),
    ],
)
def test_an_unsupported_configuration_is_refused_with_its_name(config, groups, named):
    with pytest.raises(UnsupportedError, match=named):
        paged_groups(config, groups, tensors_of())


def real_spec(kind, *, latent=False, heads=2, **changes):
    fields = {"block_size": TOKENS, "num_kv_heads": 1 if latent else heads, "head_size": 64}
    return kind(**fields, dtype=torch.bfloat16, **changes)


FULL, WINDOW = real_spec(kv.FullAttentionSpec), real_spec(kv.SlidingWindowSpec, sliding_window=128)
CHUNK = real_spec(kv.ChunkedLocalAttentionSpec, attention_chunk_size=128)
LATENT = real_spec(kv.MLAAttentionSpec, latent=True)
INDEX = LATENT.__class__(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
STATE = kv.MambaSpec(block_size=TOKENS, shapes=((8,),), dtypes=(torch.float32,))


def uniform(**specs):
    spec = kv.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    return [SimpleNamespace(layer_names=list(specs), kv_cache_spec=spec)]


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        (groups_of(FULL).kv_cache_groups, cached_models.FULL),
        (groups_of(LATENT).kv_cache_groups, cached_models.FULL),
        (groups_of(WINDOW, WINDOW, FULL).kv_cache_groups, cached_models.WINDOWS),
        (groups_of(CHUNK, FULL).kv_cache_groups, cached_models.CHUNKS),
        (groups_of(WINDOW).kv_cache_groups, cached_models.WINDOW_ONLY),
        (groups_of(STATE, FULL).kv_cache_groups, cached_models.RECURRENT),
        (groups_of(STATE, LATENT).kv_cache_groups, cached_models.RECURRENT),
        (uniform(a=FULL, b=real_spec(kv.FullAttentionSpec, heads=4)), cached_models.SIZES),
        (groups_of(WINDOW, real_spec(kv.FullAttentionSpec, heads=4)).kv_cache_groups,
         cached_models.SIZES),
        (uniform(a=LATENT, b=INDEX), cached_models.SPARSE),
        (groups_of(kv.CrossAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64,
                                         dtype=torch.bfloat16)).kv_cache_groups,
         cached_models.OTHER),
    ],
)  # fmt: skip
def test_the_kind_of_a_model_follows_from_its_kv_cache_groups(groups, kind):
    assert model_kind(groups) is kind
    if kind.caching is not Caching.YES:
        text = why_not_cached(groups)
        assert kind.layers in text
        assert kind.why in text


def test_pages_are_rows_of_each_layer(group):
    tensors = tensors_of()
    geometry = geometry_of(group, tensors, PAGES)
    assert geometry.bases == (tensors["a"].data_ptr(), tensors["b"].data_ptr())
    assert geometry.page_bytes == geometry.stride_bytes == group.spec.page_size_bytes
    assert geometry.pages == PAGES


def test_pages_of_several_kernel_rows_are_one_run(group):
    tensors = tensors_of((PAGES * 2, HEADS, TOKENS // 2, 2 * HEAD_SIZE))
    geometry = geometry_of(group, tensors, PAGES)
    assert geometry.page_bytes == geometry.stride_bytes == group.spec.page_size_bytes
    assert geometry.order != geometry_of(group, tensors_of(), PAGES).order


def test_pages_may_have_layers_or_padding_between_them(group):
    whole = torch.zeros((PAGES, 2, HEADS, TOKENS, 2 * HEAD_SIZE), dtype=torch.bfloat16)
    tensors = {"a": whole[:, 0], "b": whole[:, 1]}
    geometry = geometry_of(group, tensors, PAGES)
    assert geometry.stride_bytes == 2 * geometry.page_bytes
    assert geometry.bases[1] - geometry.bases[0] == geometry.page_bytes


def test_the_memory_order_inside_a_page_is_part_of_the_geometry(group):
    swapped = tensors_of((PAGES, TOKENS, HEADS, 2 * HEAD_SIZE))
    tensors = {name: tensor.transpose(1, 2) for name, tensor in swapped.items()}
    assert tensors["a"].shape == tensors_of()["a"].shape
    assert geometry_of(group, tensors, PAGES).order != geometry_of(group, tensors_of(), PAGES).order


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a": torch.zeros(1)}, "no KV cache for layer 'b'"),
        (tensors_of() | {"b": torch.zeros(3, 4)}, "layers differ"),
        (tensors_of((PAGES + 1, HEADS, TOKENS, 2 * HEAD_SIZE)), "not a multiple of 10"),
        (tensors_of(dtype=torch.float32), "vLLM's configuration says"),
        (
            {name: tensor[:, :, :, ::2] for name, tensor in
             tensors_of((PAGES, HEADS, TOKENS, 4 * HEAD_SIZE)).items()},
            "not contiguous",
        ),
        (
            {name: tensor.transpose(0, 1) for name, tensor in
             tensors_of((HEADS, PAGES, TOKENS, 2 * HEAD_SIZE)).items()},
            "not contiguous",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_hold_plain_pages_are_refused(group, tensors, named):
    with pytest.raises(UnsupportedError, match=named):
        geometry_of(group, tensors, PAGES)


def layers_at(*bases, tokens=TOKENS, size=HEAD_SIZE):
    """Tensors of layers, by name; layers with the same number share their memory."""
    memory = {
        base: torch.zeros((PAGES, 2, tokens, 2 * size), dtype=torch.bfloat16) for base in set(bases)
    }
    return {f"model.layers.{number}.attn": memory[base] for number, base in enumerate(bases)}


def divided(tensors, **specs):
    """vLLM's groups: each name in `specs` has the numbers of its layers, and their specification.

    Names only keep the groups apart.
    """
    names = list(tensors)
    groups = [
        SimpleNamespace(layer_names=[names[at] for at in numbers], kv_cache_spec=spec)
        for numbers, spec in specs.values()
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def attention(kind, *, size=HEAD_SIZE, **changes):
    return kind(block_size=TOKENS, num_kv_heads=2, head_size=size, dtype=torch.bfloat16, **changes)


WINDOW_128 = attention(kv.SlidingWindowSpec, sliding_window=128)
FULL_32 = attention(kv.FullAttentionSpec)


def test_layers_that_are_alike_are_one_group_however_vllm_divides_them():
    tensors = layers_at(0, 0, 0)
    config = divided(tensors, a=([0], WINDOW_128), b=([1], WINDOW_128), c=([2], FULL_32))
    window, full = paged_groups(config_of(), config, tensors)
    assert window.kv_group == KvGroup("window", 128, (0, 1))
    assert full.kv_group == KvGroup("full", 0, (2,))
    assert (window.tables, full.tables) == ((0, 1), (2,))
    geometry = geometry_of(window, tensors, PAGES)
    assert geometry.bases == (tensors["model.layers.0.attn"].data_ptr(),)
    pages = geometry.pages_of(4)
    assert pages.pages_per_block == 8  # four of each table
    assert pages.raw_bytes == 2 * 4 * geometry.page_bytes


def test_the_layers_of_a_slot_share_their_memory():
    tensors = layers_at(0, 1, 1, 0)
    config = divided(tensors, a=([0, 1], WINDOW_128), b=([2, 3], WINDOW_128))
    (group,) = paged_groups(config_of(), config, tensors)
    numbers = [int(name.split(".")[2]) for name in group.layers]
    assert numbers == [0, 3, 1, 2]
    assert len(geometry_of(group, tensors, PAGES).bases) == 2


def test_tables_with_layers_of_their_own_are_groups_of_their_own():
    tensors = layers_at(0, 1, 0)
    config = divided(tensors, a=([0, 1], WINDOW_128), b=([2], WINDOW_128))
    groups = paged_groups(config_of(), config, tensors)
    assert [group.tables for group in groups] == [(0,), (1,)]
    assert [group.numbers for group in groups] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    "other",
    [
        attention(kv.SlidingWindowSpec, sliding_window=256),
        attention(kv.SlidingWindowSpec, sliding_window=128, size=64),
        attention(kv.ChunkedLocalAttentionSpec, attention_chunk_size=128),
        FULL_32,
    ],
)
def test_layers_that_differ_in_kind_window_or_size_are_two_groups(other):
    tensors = layers_at(0, 1)
    config = divided(tensors, a=([0], WINDOW_128), b=([1], other))
    assert len(paged_groups(config_of(), config, tensors)) == 2


def recurrent_spec(mode):
    return kv.MambaSpec(
        block_size=TOKENS, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def test_recurrent_layers_need_prefix_caching():
    tensors = layers_at(0)
    config = divided(tensors, a=([0], recurrent_spec("none")))
    with pytest.raises(UnsupportedError, match="start it with --enable-prefix-caching"):
        paged_groups(config_of(), config, tensors)


def test_layers_are_counted_in_the_order_of_the_model():
    names = ["model.10.mixer", "model.layers.9.attn", "model.layers.10.attn", "model.2.mixer"]
    tensors = dict(zip(names, layers_at(0, 1, 2, 3).values(), strict=True))
    state = recurrent_spec("align")
    config = divided(tensors, a=([1, 2], FULL_32), b=([0, 3], state))
    full, recurrent = paged_groups(config_of(), config, tensors)
    assert full.kv_group == KvGroup("full", 0, (1, 3))
    assert recurrent.kv_group == KvGroup("recurrent", 0, (0, 2))


def test_copies_that_vllm_rebuilds_are_not_cached():
    tensors = layers_at(0, 1)
    config = divided(tensors, a=([0], FULL_32), b=([1], WINDOW_128))
    config.kv_cache_groups[1].enable_kv_transfer = False
    assert [group.tables for group in paged_groups(config_of(), config, tensors)] == [(0,)]


def test_a_group_with_pages_of_an_unknown_kind_is_refused():
    tensors = layers_at(0, 1)
    sinks = attention(kv.SinkFullAttentionSpec, sink_len=4)
    config = divided(tensors, a=([0], FULL_32), b=([1], sinks))
    with pytest.raises(UnsupportedError, match="1 of SinkFullAttentionSpec"):
        paged_groups(config_of(), config, tensors)
