"""Which engines have portable blocks, and what the others do."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends import cpu_attn

from holdfast.blocks.fingerprint import KvGroup
from holdfast.blocks.layout import Layout
from holdfast.blocks.payload_part import covers
from holdfast.devices.page_format import cpu_format, plain_format
from holdfast.engines.vllm import block_forms as forms_module
from holdfast.engines.vllm import portable
from holdfast.engines.vllm.block_forms import WorkerCache, block_forms
from holdfast.engines.vllm.options import ConnectorSettings
from holdfast.engines.vllm.unsupported import UnsupportedError
from holdfast.engines.vllm.worker_rank import WorkerRank
from holdfast.testing.packings import pack_hnd, pack_hnd_fused, pack_nhd_fused

SETTING = ConnectorSettings("", "default", 0, "pinned", 0.05, 5.0, saves=True, layout="portable")
PAGES, TOKENS, SIZE, HEADS = 6, 32, 64, 4
FOUR = tuple(f"model.layers.{number}.self_attn.attn" for number in range(4))
NAMES = FOUR[:2]


def config_of(ranks=1, device="cpu", cache="auto", backend="CPU_ATTN"):
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(cache_dtype=cache),
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(
            model_arch_config=[SimpleNamespace(total_num_kv_heads=HEADS)] * len(FOUR)
        ),
        speculative_config=None,
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


def cache_of(groups, tensors, config=None, rank=0):
    """The cache of a worker whose KV cache groups have these names and specifications."""
    listed = [
        SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups
    ]
    config = config or config_of()
    pages = SimpleNamespace(num_blocks=PAGES, kv_cache_groups=listed)
    return WorkerCache(config, pages, tensors, rank_in(config, rank))


def form_of(spec, config=None, rank=0, names=NAMES, shape=None, setting=SETTING):
    row = spec.head_size if isinstance(spec, kv.MLAAttentionSpec) else 2 * spec.head_size
    shape = shape or (PAGES, spec.num_kv_heads, TOKENS, row)
    tensors = {name: torch.zeros(shape, dtype=spec.dtype) for name in names}
    return only_form(cache_of([(names, spec)], tensors, config, rank), setting)


def only_form(cache, setting=SETTING):
    (form,) = block_forms(cache, setting)
    return form


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Fingerprints say here which of the two they are."""
    pages = SimpleNamespace(raw_bytes=64, block_tokens=TOKENS)
    exact = SimpleNamespace(kind="exact", representation=pages)
    monkeypatch.setattr(forms_module, "fingerprint_of", lambda *_: exact)
    monkeypatch.setattr(
        forms_module,
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
    assert form.portable == (pages, layout.whole(), ((0, 1),))
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
    pages = [torch.zeros((PAGES, TOKENS, 1, 576), dtype=torch.bfloat16) for _ in NAMES]
    tensors = {name: each.transpose(1, 2) for name, each in zip(NAMES, pages, strict=True)}
    cache = cache_of([(NAMES, latent())], tensors, config_of(backend="CPU_MLA"))
    assert only_form(cache).portable


def window(heads=HEADS, tokens=100):
    return kv.SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=SIZE, dtype=torch.bfloat16,
        sliding_window=tokens,
    )  # fmt: skip


def slots(count, heads=HEADS):
    return torch.zeros((count, PAGES, heads, TOKENS, 2 * SIZE), dtype=torch.bfloat16)


def test_layers_have_the_models_order_whatever_order_vllm_lists_them_in():
    form = form_of(full(), names=NAMES[::-1])
    assert (form.group.layers, form.group.numbers) == (NAMES, (0, 1))
    assert form.portable.lists == ((0, 1),)


def test_layers_of_a_kind_share_blocks_in_whatever_page_lists_vllm_has_their_pages():
    """As vLLM lists three layers with windows: the memory of one is that of others, too."""
    (memory,) = slots(1)
    groups = [([name], window()) for name in FOUR[:3]] + [([FOUR[3]], full())]
    forms = block_forms(cache_of(groups, dict.fromkeys(FOUR, memory)), SETTING)
    windows, whole = forms
    assert (windows.group.attention, whole.group.attention) == ("window", "full")
    assert windows.portable.lists == ((0,), (1,), (2,))
    assert (windows.group.tables, whole.group.tables) == ((0, 1, 2), (3,))
    assert (windows.pages.lists, windows.pages.pages_per_block) == (3, 3 * 4)
    assert windows.group.kv_group == KvGroup("window", 100, (0, 1, 2))
    assert whole.group.kv_group == KvGroup("full", 0, (3,))
    base = memory.data_ptr()
    assert [each.bases for each in windows.pages.groups] == [(base,)] * 3


def test_layers_of_a_kind_share_blocks_if_their_page_lists_have_different_numbers_of_layers():
    """Exact blocks make two groups of them: the layers of one slot share their memory there."""
    first, second = slots(2)
    groups = [([FOUR[0], FOUR[2]], window()), ([FOUR[1]], window())]
    tensors = {FOUR[0]: first, FOUR[1]: first, FOUR[2]: second}
    cache = cache_of(groups, tensors)
    form = only_form(cache)
    assert form.portable.lists == ((0, 2), (1,))
    assert form.group.kv_group == KvGroup("window", 100, (0, 1, 2))
    assert len(block_forms(cache, SETTING._replace(layout="exact"))) == 2


def staged(monkeypatch, stages, size=1, setting=SETTING):
    """The blocks of each rank of an engine with pipeline stages, which have these groups."""
    told, everyone = {}, threading.Barrier(len(stages) * size, timeout=60)

    def gather(rank, own):
        told[rank.pp_rank] = own
        everyone.wait()
        return [told[stage] for stage in range(len(stages))]

    monkeypatch.setattr(forms_module, "gather_stages", gather)
    with ThreadPoolExecutor(len(stages) * size) as threads:
        started = []
        for stage, groups in enumerate(stages):
            tensors = {
                name: memory
                for names, spec in groups
                for name, memory in zip(names, slots(len(names), spec.num_kv_heads), strict=True)
            }
            for rank in range(size):
                cache = cache_of(groups, tensors, config_of(size))
                cache = cache._replace(rank=WorkerRank(rank, size, stage, len(stages)))
                started.append(threads.submit(block_forms, cache, setting))
        return [each.result() for each in started]


@pytest.mark.parametrize("size", [1, 2])
def test_pipeline_stages_share_a_block_and_each_fills_its_layers(monkeypatch, size):
    spec = full(HEADS // size)
    forms = staged(monkeypatch, [[(FOUR[:1], spec)], [(FOUR[1:], spec)]], size)
    only = [form for (form,) in forms]
    assert {form.group.layers for form in only} == {FOUR}
    assert {form.group.numbers for form in only} == {(0, 1, 2, 3)}
    assert [form.portable.lists for form in only] == [((0,),)] * size + [((1, 2, 3),)] * size
    assert [form.held for form in only] == [FOUR[:1]] * size + [FOUR[1:]] * size
    (layout,) = {form.portable.part.layout for form in only}
    assert covers(frozenset(form.part for form in only), layout.raw_bytes)


@pytest.mark.parametrize("layout", ["portable", "exact"])
def test_a_stage_that_fails_in_any_way_answers_the_stages_that_wait_for_it(monkeypatch, layout):
    told = []
    monkeypatch.setattr(forms_module, "gather_stages", lambda _rank, own: told.append(own))
    monkeypatch.setattr(forms_module, "paged_groups", lambda *_: 1 / 0)
    cache = cache_of([(FOUR[:1], full())], dict.fromkeys(FOUR[:1], slots(1)[0]))
    with pytest.raises(ZeroDivisionError):
        block_forms(cache, SETTING._replace(layout=layout))
    assert [each.refusal for each in told] == ["division by zero"]


def test_stages_with_several_kinds_of_layers_have_the_page_lists_of_the_model(monkeypatch):
    stages = [
        [([FOUR[0]], window()), ([], window()), ([FOUR[1]], full())],
        [([], window()), ([FOUR[2]], window()), ([FOUR[3]], full())],
    ]
    forms = staged(monkeypatch, stages)
    assert [[form.group.kv_group for form in each] for each in forms] == [
        [KvGroup("window", 100, (0, 2)), KvGroup("full", 0, (1, 3))]
    ] * 2
    assert [[form.group.tables for form in each] for each in forms] == [[(0, 1), (2,)]] * 2
    windows = [each[0] for each in forms]
    assert [form.portable.lists for form in windows] == [((0,), ()), ((), (1,))]
    assert covers(
        frozenset(form.part for form in windows), windows[0].portable.part.layout.raw_bytes
    )


def test_blocks_of_all_stages_are_exact_if_one_has_no_layer_of_a_kind(monkeypatch, caplog):
    stages = [[(FOUR[:2], window())], [(FOUR[2:3], window()), (FOUR[3:], full())]]
    forms = staged(monkeypatch, stages)
    assert all(form.portable is None for each in forms for form in each)
    named = "pipeline stage 0 has none of the 1 layers with full attention"
    assert caplog.text.count(named) == len(stages)


def test_exact_blocks_of_a_stage_are_named_by_the_numbers_of_its_layers_in_the_model(monkeypatch):
    """Stages of other sizes may have as many layers, and other ones."""
    exact, spec = SETTING._replace(layout="exact"), full()
    for sizes in ((1, 2, 1), (2, 1, 1), (1, 1, 2)):
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
        layers = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        stages = [[([FOUR[number] for number in each], spec)] for each in layers]
        forms = staged(monkeypatch, stages, setting=exact)
        assert [form.group.kv_group.layers for (form,) in forms] == [*map(tuple, layers)]


def test_a_stage_that_caches_nothing_says_so_to_the_others(monkeypatch):
    cross = kv.CrossAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16
    )
    with pytest.raises(UnsupportedError, match="layers of another kind"):
        staged(monkeypatch, [[(FOUR[:2], full())], [(FOUR[2:], cross)]])


def test_blocks_of_a_model_with_a_draft_model_are_exact(caplog, monkeypatch):
    draft = SimpleNamespace(has=lambda name: name == FOUR[1], lookahead=1)
    monkeypatch.setattr("holdfast.engines.vllm.kv_groups.draft_of", lambda _: draft)
    groups = [(FOUR[:1], full()), (FOUR[1:2], full())]
    forms = block_forms(cache_of(groups, dict(zip(FOUR, slots(2), strict=False))), SETTING)
    assert [form.portable for form in forms] == [None, None]
    assert "the layers of a draft model are not converted" in caplog.text


def test_blocks_of_a_model_with_recurrent_layers_are_exact(caplog):
    state = kv.MambaSpec(
        block_size=TOKENS, shapes=((4, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
    )
    memory = torch.zeros((PAGES, 4, 64), dtype=torch.bfloat16)
    tensors = {FOUR[0]: slots(1)[0], FOUR[1]: memory}
    forms = block_forms(cache_of([(FOUR[:1], full()), (FOUR[1:2], state)], tensors), SETTING)
    assert [form.portable for form in forms] == [None, None]
    assert "the model has recurrent layers, whose states each engine keeps in a form" in caplog.text


def test_pages_with_tokens_before_heads_are_not_portable():
    whole = torch.zeros((2, PAGES, TOKENS, HEADS, 2 * SIZE), dtype=torch.bfloat16)
    tensors = dict(zip(NAMES, whole.transpose(2, 3), strict=True))
    assert only_form(cache_of([(NAMES, full())], tensors)).portable is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"spec": full(), "config": config_of(device="xpu")}, "pages on xpu are not converted"),
        ({"spec": full(), "config": config_of(device="cuda", backend="FLASHINFER")},
         "pages of FLASHINFER are not converted on a GPU, only of FLASH_ATTN and TRITON_ATTN"),
        ({"spec": latent(), "config": config_of(device="cuda", backend="FLASH_ATTN_MLA")},
         "pages of FLASH_ATTN_MLA are not"),
        ({"spec": full(), "config": config_of(cache="fp8")}, r"quantised \(fp8, NONE\)"),
        ({"spec": full(sliding_window=128)}, "layers with sliding_window 128 as full attention"),
        ({"spec": full(attention_chunk_size=64)}, "layers with attention_chunk_size 64 as full"),
        ({"spec": full(head_size_v=32), "shape": (PAGES, HEADS, TOKENS, 96)},
         "keys of 64 and values of 32"),
        ({"spec": latent(), "config": config_of(backend="AMX_MLA")}, "pages of AMX_MLA are not"),
        ({"spec": full(), "shape": (2 * PAGES, HEADS, TOKENS // 2, 2 * SIZE)},
         r"pages have the order 2x4.16.128:123; known is \[4, 32, 128\]"),
        ({"spec": full(heads=3), "config": config_of(ranks=3)}, "tp_size 3 and the 4 heads"),
        ({"spec": full(heads=1), "config": config_of(ranks=2)},
         r"a page holds 1 KV heads, and the model's settings say \[2\]"),
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
    inner = (TOKENS, heads) if order == "nhd" else (heads, TOKENS)
    tensors = {}
    for name in NAMES:
        whole = torch.zeros((PAGES, 1 + between_layers, *inner, 2 * SIZE), dtype=torch.bfloat16)
        tensors[name] = whole[:, 0].transpose(1, 2) if order == "nhd" else whole[:, 0]
    return only_form(cache_of([(NAMES, full(heads))], tensors, config, rank))


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
    assert form.portable == (pages, layout.whole(), ((0, 1),))


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
    whole = torch.zeros((2, PAGES, 2 * SIZE, HEADS, TOKENS), dtype=torch.bfloat16)
    tensors = dict(zip(NAMES, whole.permute(0, 1, 3, 4, 2), strict=True))
    config = config_of(device="cuda", backend="FLASH_ATTN")
    assert only_form(cache_of([(NAMES, full())], tensors, config)).portable is None
    assert "the order 1x4.32.128:312; known are 1x4.32.128:213 and" in caplog.text


def test_pages_on_a_gpu_of_amd_are_not_portable(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert gpu_form("nhd", Layer(pack_nhd_fused)).portable is None
    assert "pages on GPUs of AMD are not converted" in caplog.text
