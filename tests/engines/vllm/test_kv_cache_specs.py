"""The bytes of each kind of KV state, against the pages of vLLM's own specifications."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import (  # noqa: E402
    MambaStateDtypeCalculator as Types,
)
from vllm.model_executor.layers.mamba.mamba_utils import (  # noqa: E402
    MambaStateShapeCalculator as Shapes,
)
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache  # noqa: E402
from vllm.models.deepseek_v4.attention import (  # noqa: E402
    DeepseekV4Attention,
    DeepseekV4IndexerCache,
)
from vllm.transformers_utils.model_arch_config_convertor import (  # noqa: E402
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from holdfast.sim.model.catalogue import load_model, read_model  # noqa: E402
from holdfast.sim.model.fields import Fields  # noqa: E402

BLOCK = 256
TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BF16 = "bfloat16"


def part(name, kind, **having):
    """The part of a shipped model that has layers of this kind."""
    [found] = [
        each
        for each in load_model(name).attention
        if each.kind == kind and all(getattr(each, k) == v for k, v in having.items())
    ]
    return found


def token_bytes(spec):
    return spec.real_page_size_bytes / BLOCK


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("name", "kind", "spec", "heads", "extra"),
    [
        ("Llama-3.1-8B", "full", FullAttentionSpec, (8, 128), {}),
        ("MiMo-V2-Flash", "full", FullAttentionSpec, (4, 192), {"head_size_v": 128}),
        ("gpt-oss-20b", "window", SlidingWindowSpec, (8, 64), {"sliding_window": 128}),
        (
            "llama-4-maverick",
            "chunk",
            ChunkedLocalAttentionSpec,
            (8, 128),
            {"attention_chunk_size": 8192},
        ),
    ],
)
def test_the_bytes_of_kv_head_attention_match_a_vllm_page(dtype, name, kind, spec, heads, extra):
    page = spec(
        block_size=BLOCK, num_kv_heads=heads[0], head_size=heads[1], dtype=TYPES[dtype], **extra
    )
    assert part(name, kind).entry_bytes(dtype) == token_bytes(page)


def vllm_config(dtype):
    cache = SimpleNamespace(block_size=BLOCK, cache_dtype=dtype)
    return SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("Kimi-K2", "bf16", "bfloat16"),
        ("Kimi-K2", "fp8", "fp8"),
        ("DeepSeek-V3.2", "bf16", "bfloat16"),
        ("DeepSeek-V3.2", "fp8", "fp8_ds_mla"),
        ("DeepSeek-V3.2", "nvfp4", "nvfp4_ds_mla"),
        ("GLM-5", "fp8", "fp8_ds_mla"),
    ],
)
def test_the_bytes_of_latent_attention_match_a_vllm_row(name, ours, theirs):
    layer = SimpleNamespace(
        kv_cache_dtype=theirs,
        head_size=576,
        sliding_window=None,
        indexer=None,
        non_causal_multi_token_decode=False,
        topk_buffer_width=None,  # vLLM 0.33 reads it
    )
    spec = MLAAttention.get_kv_cache_spec(layer, vllm_config(theirs))
    assert part(name, "full").entry_bytes(ours) == token_bytes(spec)


def test_the_bytes_of_index_keys_match_vllm():
    scaled = 128 + 128 // 128 * 4  # what the indexers of vLLM pass on: fp8, and a scale
    config = vllm_config("bfloat16")
    cache = SimpleNamespace(
        head_dim=scaled, dtype=torch.uint8, cache_config=config.cache_config, compress_ratio=4
    )
    plain = DeepseekV32IndexerCache.get_kv_cache_spec(cache, config)
    for name in ("DeepSeek-V3.2", "GLM-5"):
        assert part(name, "full").index_bytes == token_bytes(plain)
    grouped = DeepseekV4IndexerCache.get_kv_cache_spec(cache, config)
    ours = part("DeepSeek-V4-Flash", "full", compression=4)
    assert ours.index_bytes / ours.compression == token_bytes(grouped)
    fields = {"sparse_index_dim": 128, "sparse_topk_blocks": 16, "sparse_block_size": 128}
    shape = read_model(
        Fields({**MINIMAX_M3, "sparse_attention_config": {**SPARSE, **fields}}, "m3")
    )
    [indexed] = [each for each in shape.attention if each.index_bytes]
    # What vLLM's indexer of MiniMax-M3 asks for; its module needs torchvision.
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    assert (indexed.layers, indexed.index_bytes) == (2, token_bytes(spec))


MINIMAX_M3 = {
    "model_type": "minimax_m3",
    "num_hidden_layers": 3,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 100,
    "intermediate_size": 3072,
    "num_local_experts": 0,
}
SPARSE = {"use_sparse_attention": True, "sparse_attention_freq": [0, 1, 1]}


@pytest.mark.parametrize(("ours", "theirs"), [("bf16", "bfloat16"), ("fp8", "fp8_ds_mla")])
def test_the_bytes_of_compressed_entries_match_a_vllm_row(ours, theirs):
    for ratio in (4, 128):
        layer = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype=theirs,
            kv_cache_torch_dtype=torch.bfloat16,
            head_dim=512,
        )
        spec = DeepseekV4Attention.get_kv_cache_spec(layer, vllm_config(theirs))
        found = part("DeepSeek-V4-Flash", "full", compression=ratio)
        assert found.entry_bytes(ours) / ratio == token_bytes(spec)
        assert part("DeepSeek-V4-Flash", "window").entry_bytes(ours) == found.entry_bytes(ours)


SMALL = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
SMALL |= {"hidden_size": 512, "vocab_size": 100, "intermediate_size": 64}
MAMBA1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "attn_layer_period": 4}
MAMBA1 |= {"model_type": "jamba", "attn_layer_offset": 0, "num_experts": 0}
KIMI = {"num_heads": 8, "head_dim": 32, "short_conv_kernel_size": 4, "full_attn_layers": [4]}
STATES = [
    (
        {"model_type": "own", "linear_attn_config": KIMI},
        Shapes.kda_state_shape(1, 8, 32),
        Types.kda_state_dtype(BF16, "auto"),
    ),
    (
        {
            "model_type": "qwen3_next",
            "num_experts": 0,
            "full_attention_interval": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        },
        Shapes.gated_delta_net_state_shape(1, 2, 4, 8, 16, 4),
        Types.gated_delta_net_state_dtype(BF16, "auto"),
    ),
    (
        MAMBA1,
        Shapes.mamba1_state_shape(1, 1024, 16, 4),
        Types.mamba1_state_dtype(BF16, "auto", "auto"),
    ),
    (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "MMM*",
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "conv_kernel": 4,
        },
        Shapes.mamba2_state_shape(1, 256, 2, 8, 32, 16, 4),
        Types.mamba2_state_dtype(BF16, "auto", "float32"),  # the model's own default
    ),
    (
        {"model_type": "lfm2", "full_attn_idxs": [3], "conv_L_cache": 3},
        Shapes.short_conv_state_shape(1, 512, 3),
        Types.short_conv_state_dtype(BF16, "auto"),
    ),
    (
        {"model_type": "bailing_moe_linear", "layer_group_size": 4},
        Shapes.linear_attention_state_shape(8, 1, 64),
        Types.linear_attention_state_dtype(BF16, "auto"),
    ),
]


@pytest.mark.parametrize(
    ("fields", "shapes", "dtypes"), STATES, ids=[each[0]["model_type"] for each in STATES]
)
def test_the_bytes_of_a_recurrent_state_match_a_vllm_page(fields, shapes, dtypes):
    shape = read_model(Fields({**SMALL, **fields}, "states"))
    assert shape.state_bytes() == 3 * MambaSpec(BLOCK, shapes=shapes, dtypes=dtypes).page_size_bytes


HEADS = [
    {"model_type": "falcon", "multi_query": True, "num_kv_heads": 8},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 4},
    {"model_type": "dbrx", "attn_config": {"kv_n_heads": 2}},
    {"model_type": "step3p5", "num_attention_groups": 2, "head_dim": 32},
    {"model_type": "own", "n_head_kv": 4},
    {"model_type": "zamba2", "num_key_value_heads": 4, "attention_head_dim": 48, "kv_channels": 24},
]


@pytest.mark.parametrize("fields", HEADS, ids="-".join)
def test_kv_heads_and_head_sizes_match_vllm(fields):
    given = {**SMALL, "num_key_value_heads": None, **fields, "layer_types": ["full_attention"] * 4}
    given = {name: value for name, value in given.items() if value is not None}
    config = SimpleNamespace(**given)
    if isinstance(fields.get("attn_config"), dict):
        config.attn_config = SimpleNamespace(**fields["attn_config"])
    kind = MODEL_ARCH_CONFIG_CONVERTORS.get(fields["model_type"], ModelArchConfigConvertorBase)
    found = kind(config, config)
    [full] = read_model(
        Fields({k: v for k, v in given.items() if v is not None}, "heads")
    ).attention
    assert full.elements == found.get_total_num_kv_heads() * 2 * found.get_head_size()
