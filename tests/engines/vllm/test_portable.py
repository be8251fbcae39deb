"""Which engines have portable blocks, and what the others do."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends import cpu_attn

from holdfast.blocks.layout import Layout
from holdfast.blocks.payload_part import covers
from holdfast.devices.page_format import cpu_format, plain_format
from holdfast.engines.vllm import portable
from holdfast.engines.vllm.kv_groups import PagedGroup, geometry_of
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.portable import block_form
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.testing.packings import pack_hnd, pack_hnd_fused, pack_nhd_fused

SETTING = ConnectorSettings("", "default", 0, "pinned", 0.05, 5.0, saves=True, layout="portable")
PAGES, TOKENS, SIZE, HEADS = 6, 32, 64, 4
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


def config_of(ranks=1, device="cpu", cache="auto", backend="CPU_ATTN"):
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(cache_dtype=cache),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer)),
    )


def full(heads=HEADS, size=SIZE, dtype=torch.bfloat16, **changes):
    return kv.FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=size, dtype=dtype, **changes
    )


def latent():
    return kv.MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )


def rank_in(config, rank):
    return WorkerRank(rank, config.parallel_config.tensor_parallel_size)


def form_of(spec, config=None, rank=0, names=NAMES, shape=None, setting=SETTING):
    group = PagedGroup(names, TOKENS, spec)
    row = spec.head_size if isinstance(spec, kv.MLAAttentionSpec) else 2 * spec.head_size
    shape = shape or (PAGES, spec.num_kv_heads, TOKENS, row)
    tensors = {name: torch.zeros(shape, dtype=spec.dtype) for name in names}
    geometry = geometry_of(group, tensors, PAGES)
    config = config or config_of()
    return block_form(config, group, geometry, setting, rank_in(config, rank))


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Fingerprints say here which of the two they are."""
    pages = SimpleNamespace(raw_bytes=64)
    exact = SimpleNamespace(kind="exact", representation=pages)
    monkeypatch.setattr(portable, "fingerprint_of", lambda *_: exact)
    monkeypatch.setattr(
        portable,
        "portable_fingerprint_of",
        lambda *given: SimpleNamespace(kind="portable", representation=given[2]),
    )


def test_blocks_are_exact_unless_the_option_says_portable():
    form = form_of(full(), setting=SETTING._replace(layout="exact"))
    assert (form.fingerprint.kind, form.portable) == ("exact", None)
    assert (form.part, form.writes) == (b"", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 80])
def test_blocks_of_full_attention_are_portable(dtype, size):
    form = form_of(full(size=size, dtype=dtype))
    layout = Layout.portable(
        layers=2, kv_heads=HEADS, head_size=size, dtype=str(dtype).split(".")[1], block_tokens=128
    )
    isa = cpu_attn._get_attn_isa(dtype, TOKENS, size)
    pages = cpu_format(isa, HEADS, TOKENS, size, dtype.itemsize)
    assert form.fingerprint.kind == "portable"
    assert form.portable == (pages, layout.whole())
    assert (form.part, form.writes) == (b"", True)


def test_ranks_share_a_block_of_the_whole_model():
    forms = [form_of(full(heads=2), config_of(ranks=2), rank) for rank in range(2)]
    assert [form.portable.part.heads[0] for form in forms] == [range(2), range(2, 4)]
    assert len({form.portable.part.layout for form in forms}) == 1
    assert all(form.writes for form in forms)
    raw_bytes = forms[0].portable.part.layout.raw_bytes
    assert covers(frozenset(form.part for form in forms), raw_bytes)


def test_of_ranks_with_copies_of_a_head_or_of_latents_one_writes():
    forms = [form_of(full(heads=1), config_of(ranks=8), rank) for rank in range(8)]
    assert [form.writes for form in forms] == [True, False] * 4
    config = config_of(ranks=2, backend="CPU_MLA")
    forms = [form_of(latent(), config, rank) for rank in range(2)]
    assert [form.writes for form in forms] == [True, False]
    assert forms[0].part == b""
    assert forms[0].portable.part.layout.raw_bytes == 2 * 128 * 576 * 2


def test_pages_whose_tensor_has_axes_of_length_1_elsewhere_are_portable():
    """As vLLM's tensor of latents: a view of [page, token, 1, element]."""
    group = PagedGroup(NAMES, TOKENS, latent())
    whole = torch.zeros((PAGES, TOKENS, 1, 576), dtype=torch.bfloat16)
    geometry = geometry_of(group, dict.fromkeys(NAMES, whole.transpose(1, 2)), PAGES)
    assert geometry.order.endswith(":213")
    assert block_form(config_of(backend="CPU_MLA"), group, geometry, SETTING, WorkerRank()).portable


def test_pages_with_tokens_before_heads_are_not_portable():
    group = PagedGroup(NAMES, TOKENS, full())
    whole = torch.zeros((PAGES, TOKENS, HEADS, 2 * SIZE), dtype=torch.bfloat16)
    geometry = geometry_of(group, dict.fromkeys(NAMES, whole.transpose(1, 2)), PAGES)
    assert block_form(config_of(), group, geometry, SETTING, WorkerRank()).portable is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"spec": full(), "config": config_of(device="xpu")}, "pages on xpu are not converted"),
        ({"spec": full(), "config": config_of(device="cuda", backend="FLASHINFER")},
         "pages of FLASHINFER are not converted on a GPU, only of FLASH_ATTN and TRITON_ATTN"),
        ({"spec": latent(), "config": config_of(device="cuda", backend="FLASH_ATTN_MLA")},
         "pages of FLASH_ATTN_MLA are not"),
        ({"spec": full(), "config": config_of(cache="fp8")}, r"quantised \(fp8, NONE\)"),
        ({"spec": full(sliding_window=128)}, "layers with sliding_window 128"),
        ({"spec": full(attention_chunk_size=64)}, "layers with attention_chunk_size 64"),
        ({"spec": full(head_size_v=32), "shape": (PAGES, HEADS, TOKENS, 96)},
         "keys of 64 and values of 32"),
        ({"spec": latent(), "config": config_of(backend="AMX_MLA")}, "pages of AMX_MLA are not"),
        ({"spec": full(), "names": NAMES[::-1]}, r"in the order \[1, 0\]"),
        ({"spec": full(), "shape": (2 * PAGES, HEADS, TOKENS // 2, 2 * SIZE)},
         r"pages have the order 2x4.16.128:123; known is \[4, 32, 128\]"),
        ({"spec": full(heads=3), "config": config_of(ranks=3)}, "tp_size 3 and the 4 heads"),
    ],
)  # fmt: skip
def test_blocks_are_exact_with_a_warning_if_pages_cannot_be_converted(arguments, named, caplog):
    form = form_of(**arguments)
    assert (form.fingerprint.kind, form.portable) == ("exact", None)
    (record,) = [each for each in caplog.records if each.name == "vllm.holdfast"]
    assert "blocks are exact, not portable" in record.getMessage()
    assert re.search(named, record.getMessage())


def test_blocks_are_exact_if_the_kernel_packs_in_another_order(monkeypatch, caplog):
    """For example a version of vLLM whose `vec` is what `amx` is today."""
    monkeypatch.setattr(portable, "cpu_format", lambda _isa, *sizes: cpu_format("amx", *sizes))
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    assert form_of(full()).portable is None
    assert "orders keys and values of 'vec' pages in another way" in caplog.text


def test_an_instruction_set_that_is_not_known_has_exact_blocks(monkeypatch, caplog):
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "neon")
    assert form_of(full()).portable is None
    assert "pages of 'neon' is not known" in caplog.text


PACKERS = {"nhd": pack_nhd_fused, "hnd": pack_hnd_fused}


class Layer:
    """An attention layer on a GPU, whose code writes pages in the order of a packer."""

    def __init__(self, packer, backend="FLASH_ATTN"):
        self.impl = self
        self.attn_backend = SimpleNamespace(get_name=lambda: backend)
        self._packer = packer

    def do_kv_cache_update(self, _layer, keys, values, cache, slots):
        tokens = cache.shape[2]
        assert slots.tolist() == list(range(tokens, 2 * tokens))
        states = (each.transpose(0, 1).view(torch.int16).numpy() for each in (keys, values))
        page = torch.from_numpy(self._packer(*states)).view(keys.dtype)
        memory = cache if cache.is_contiguous() else cache.transpose(1, 2)
        memory[1] = page.reshape(memory.shape[1:])


def gpu_form(order, layer, between_layers=0, heads=HEADS, ranks=1, rank=0):
    """The blocks of an engine on a GPU whose pages have an order, padded by other layers' pages."""
    config = config_of(ranks, "cuda", backend=layer.attn_backend.get_name())
    config.compilation_config.static_forward_context = dict.fromkeys(NAMES, layer)
    group = PagedGroup(NAMES, TOKENS, full(heads))
    inner = (TOKENS, heads) if order == "nhd" else (heads, TOKENS)
    whole = torch.zeros((PAGES, 1 + between_layers, *inner, 2 * SIZE), dtype=torch.bfloat16)
    pages = whole[:, 0].transpose(1, 2) if order == "nhd" else whole[:, 0]
    geometry = geometry_of(group, dict.fromkeys(NAMES, pages), PAGES)
    return block_form(config, group, geometry, SETTING, rank_in(config, rank))


@pytest.mark.parametrize("between_layers", [0, 3], ids=["layer by layer", "block by block"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
@pytest.mark.parametrize("order", PACKERS)
def test_blocks_of_full_attention_on_a_gpu_are_portable(order, backend, between_layers):
    form = gpu_form(order, Layer(PACKERS[order], backend), between_layers)
    layout = Layout.portable(
        layers=2, kv_heads=HEADS, head_size=SIZE, dtype="bfloat16", block_tokens=128
    )
    pages = plain_format(order, HEADS, TOKENS, (SIZE, SIZE), 2, fused=True)
    assert form.fingerprint.kind == "portable"
    assert form.portable == (pages, layout.whole())


def test_ranks_on_gpus_share_a_block_and_one_head_has_either_order():
    for order, packer in PACKERS.items():
        forms = [gpu_form(order, Layer(packer), heads=1, ranks=4, rank=rank) for rank in range(4)]
        heads = [form.portable.part.heads[0] for form in forms]
        assert heads == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def broken(*_):
    raise AssertionError("no such layout")


@pytest.mark.parametrize(
    ("packer", "named"),
    [
        (pack_hnd_fused, "orders keys and values of FLASH_ATTN pages in another way"),
        (pack_hnd, "orders keys and values of FLASH_ATTN pages in another way"),
        (lambda keys, values: pack_nhd_fused(values, keys), "in another way"),
        (broken, "vLLM does not write pages of FLASH_ATTN: no such layout"),
    ],
)
def test_blocks_on_a_gpu_are_exact_if_its_layers_write_pages_in_another_order(
    packer, named, caplog
):
    assert gpu_form("nhd", Layer(packer)).portable is None
    assert named in caplog.text


def test_pages_on_a_gpu_of_an_order_that_is_not_known_are_not_portable(caplog):
    group = PagedGroup(NAMES, TOKENS, full())
    whole = torch.zeros((PAGES, 2 * SIZE, HEADS, TOKENS), dtype=torch.bfloat16)
    pages = whole.permute(0, 2, 3, 1)
    geometry = geometry_of(group, dict.fromkeys(NAMES, pages), PAGES)
    config = config_of(device="cuda", backend="FLASH_ATTN")
    assert block_form(config, group, geometry, SETTING, WorkerRank()).portable is None
    assert "the order 1x4.32.128:312; known are 1x4.32.128:213 and" in caplog.text


def test_pages_on_a_gpu_of_amd_are_not_portable(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert gpu_form("nhd", Layer(pack_nhd_fused)).portable is None
    assert "pages on GPUs of AMD are not converted" in caplog.text
