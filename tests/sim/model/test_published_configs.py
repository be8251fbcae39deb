"""Configs as publishers and transformers write them: understood, or refused by the field's name."""

import json
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.model.catalogue import load_model, read_model
from holdfast.sim.model.fields import Fields

CONFIGS = Path(__file__).parent / "configs"
B = 2
"""Bytes of an element in bf16."""

# Bytes a token and fixed bytes, from the fields: layers x heads x (key + value) x bytes.
RIGHT = {
    "cross_attention_mllama": (32 * 8 * 256 * B, 0),
    "gemma3n_list_of_widths": (4 * 2 * 512 * B, 16 * 2 * 512 * B * 512),
    "head_dim_class_default_gemma3_12b": (8 * 8 * 512 * B, 40 * 8 * 512 * B * 1024),
    "head_dim_named_kv_channels": (24 * 16 * 256 * B, 0),
    "hybrid_ring_mini_linear": (4 * 4 * 256 * B, 16 * 16 * 128 * 128 * B),
    "kvheads_falcon_40b": (60 * 8 * 128 * B, 0),
    "kvheads_falcon_7b": (32 * 1 * 128 * B, 0),
    "kvheads_falcon_7b_as_published": (32 * 1 * 128 * B, 0),
    "kvheads_n_kv_heads": (32 * 8 * 256 * B, 0),
    "kvheads_step35": (12 * 8 * 256 * B, 33 * 8 * 256 * B * 512),
    "layer_types_longer_than_layers": (12 * 8 * 256 * B, 33 * 8 * 256 * B * 512),
    "nested_omni_thinker_with_root_fields": (48 * 4 * 256 * B, 0),
    "nested_qwen3_asr": (28 * 8 * 256 * B, 0),
    "per_layer_config_gemma4_26b_resaved": (5 * 2 * 1024 * B, 25 * 8 * 512 * B * 1024),
    "per_layer_config_two_layers": ((4 * 2 * 512 + 2 * 2 * 1024) * B, 0),
    "sparse_minimax_m3": ((60 * 4 * 256 + 57 * 128) * B, 0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_published_config_gives_the_kv_bytes_of_its_fields(name):
    shape = load_model(str(CONFIGS / f"{name}.json"))
    assert (shape.kv_bytes_per_token(), shape.fixed_bytes()) == RIGHT[name]


RESAVED = {
    "per_layer_config_gemma4_26b_resaved": "gemma-4-26B-A4B",
    "resaved_deepseek_v32": "DeepSeek-V3.2",
    "resaved_deepseek_v4_flash": "DeepSeek-V4-Flash",
    "resaved_glm5": "GLM-5",
    "resaved_nemotron3_super": "Nemotron-3-Super",
}


@pytest.mark.parametrize("name", RESAVED)
def test_a_config_resaved_by_transformers_gives_the_published_shape(name):
    again, published = load_model(str(CONFIGS / f"{name}.json")), load_model(RESAVED[name])
    assert again.kv_bytes_per_token() == published.kv_bytes_per_token()
    assert again.kv_bytes_per_token("fp8") == published.kv_bytes_per_token("fp8")
    assert again.fixed_bytes() == published.fixed_bytes()
    assert (again.active_parameters, again.parameters, again.weights_bytes) == (
        published.active_parameters,
        published.parameters,
        published.weights_bytes,
    )


QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "intermediate_size": 96,
}
ONE = 2 * 2 * 16 * B
"""Bytes that a token takes in one layer of QWEN3."""


def read(**fields):
    return read_model(Fields({k: v for k, v in fields.items() if v is not ...}, "mine"))


# Fields of one model under other names, with absent ones, or in other places: what to change, and
# the bytes a token in the layers that then grow.
GIVEN = [
    ({"num_key_value_heads": ..., "n_kv_heads": 2}, 8 * ONE),
    ({"num_key_value_heads": ..., "num_query_groups": 2, "model_type": "own"}, 8 * ONE),
    ({"num_key_value_heads": [2, 2, 2, 2, 1, 1, 1, 1]}, 6 * ONE),
    ({"num_key_value_heads": ..., "multi_query": True, "model_type": "gpt_bigcode"}, 4 * ONE),
    ({"num_key_value_heads": ..., "model_type": "gpt_bigcode"}, 4 * ONE),
    ({"num_key_value_heads": ..., "multi_query": False, "model_type": "gpt_bigcode"}, 16 * ONE),
    (
        {
            "num_key_value_heads": ...,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "model_type": "chatglm",
        },
        8 * ONE,
    ),
    ({"num_key_value_heads": ..., "attn_config": {"kv_n_heads": 2}, "model_type": "dbrx"}, 8 * ONE),
    ({"head_dim": ..., "model_type": "llama"}, 8 * ONE),
    ({"head_dim": ...}, 8 * 2 * 2 * 128 * B),  # the class's own default
    ({"head_dim": None}, 8 * ONE),
    (
        {"head_dim": ..., "model_type": "qwen3_next", "layer_types": ["full_attention"] * 8},
        16 * 8 * ONE,
    ),
    ({"per_layer_config": {"3": {"head_dim": 32}}}, 9 * ONE),
    (
        {"per_layer_config": {"3": {"num_key_value_heads": 1}, "4": {"intermediate_size": 8}}},
        7.5 * ONE,
    ),
    ({"per_layer_config": {"3": {"sliding_window": 9}}, "model_type": "llama"}, 7 * ONE),
    ({"cross_attention_layers": [1, 5]}, 6 * ONE),
    ({"num_hidden_layers": 8.0, "v_head_dim": 0}, 8 * ONE),
    ({"num_nextn_predict_layers": 1, "layer_types": ["full_attention"] * 9}, 8 * ONE),
    ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}, 8 * ONE),
    (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            }
        },
        8 * ONE / 2,
    ),
    ({"compression_config": {"quant_method": "x", "kv_cache_scheme": None}}, 8 * ONE),
    ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, 4 * ONE),
    # What does not matter is not asked about.
    (
        {"rope_scaling": {"factor": 8}, "use_qk_norm": True, "n_group": 8, "rope_head_dim": 64},
        8 * ONE,
    ),
    ({"window_size": None, "kv_sharing": False, "attn_dropout": 0.1, "mtp_num_layers": 2}, 8 * ONE),
]


@pytest.mark.parametrize(("change", "a_token"), GIVEN)
def test_renamed_and_absent_fields_have_the_meaning_of_the_model_class(change, a_token):
    assert read(**{**QWEN3, **change}).kv_bytes_per_token() == a_token


# Fields of published configs that look as if they shaped the KV state, by model type.
BESIDE = {
    "bloom": {"attention_softmax_in_fp32": True, "skip_bias_add": True, "offset_alibi": 100},
    "chatglm": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    "cohere": {"use_embedding_sharing": True, "use_parallel_block": True, "logit_scale": 0.0625},
    "dots1": {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 2, "seq_aux": True},
    "ernie4_5": {"compression_ratio": 1.0, "use_flash_attention": True},
    "gemma": {"hidden_activation": "gelu", "cache_implementation": "hybrid"},
    "glm4_moe": {"num_nextn_predict_layers": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "window_size": 256},
    "hunyuan_v1_moe": {"use_cla": False, "cla_share_factor": 2, "num_media_embeds": 257},
    "internlm2": {"attn_implementation": "eager", "bias": False},
    "lfm2": {"block_dim": 64, "block_ff_dim": 96, "conv_dim": 64, "conv_dim_out": 64},
    "llama": {"pretraining_tp": 1, "_name_or_path": "x", "rope_scaling": {"short_factor": [1.0]}},
    "minimax_m2": {"attn_type_list": [1] * 8, "mtp_transformer_layers": 1, "num_mtp_modules": 3},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "olmo2": {"clip_qkv": 8.0},
    "opt": {"word_embed_proj_dim": 64, "do_layer_norm_before": True, "prefix": "</s>"},
    "phi3": {"full_attn_mod": 1, "sliding_window": 262_144, "max_position_embeddings": 131_072},
    "qwen2": {"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
    "qwen2_vl": {"rope_scaling": {"mrope_section": [16, 24, 24]}, "vision_start_token_id": 5},
    "qwen3": {"chunk_size_feed_forward": 0, "num_beam_groups": 1, "pruned_heads": {}},
    "seed_oss": {"attention_out_bias": False, "residual_dropout": 0.1},
    "stablelm": {"use_qkv_bias": True, "rotary_scaling_factor": 1.0},
    "own": {"ignore_index": -100, "image_token_index": 7, "kv_sharing": None, "use_kv_norm": True},
}


@pytest.mark.parametrize("kind", BESIDE)
def test_published_configs_are_not_refused_for_fields_that_do_not_matter(kind):
    config = {**QWEN3, "model_type": kind, **BESIDE[kind]}
    assert read(**config).kv_bytes_per_token() == 8 * ONE


def test_linear_layers_of_minimax_keep_a_matrix_for_each_head():
    kinds = [0, 0, 0, 1] * 2
    shape = read(**{**QWEN3, "model_type": "minimax_text_01", "attn_type_list": kinds})
    assert shape.kv_bytes_per_token() == 2 * ONE
    assert shape.state_bytes() == 6 * 4 * 16 * 16 * B


def test_old_names_and_layouts_of_gpt_models_are_read():
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
    shape = read(**gpt2, vocab_size=50_257, n_inner=None, n_ctx=1024)
    assert shape.kv_bytes_per_token() == 12 * 2 * 768 * B
    assert shape.context_max == 1024
    assert shape.parameters == pytest.approx(124e6, rel=0.01)
    refined = {"model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8, "n_layer": 60}
    shape = read(**refined, hidden_size=8192, vocab_size=65_024, multi_query=True)
    assert shape.kv_bytes_per_token() == 60 * 8 * 128 * B
    attention = {"attn_type": "multihead_attention", "clip_qkv": 6, "prefix_lm": False}
    mpt = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048}
    shape = read(model_type="mpt", **mpt, vocab_size=50_432, attn_config=attention)
    assert shape.kv_bytes_per_token() == 32 * 2 * 4096 * B
    experts = {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4}
    dbrx = {"d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768}
    dbrx |= {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8}, "ffn_config": experts}
    shape = read(model_type="dbrx", **dbrx, vocab_size=100_352)
    assert shape.kv_bytes_per_token() == 40 * 8 * 256 * B
    assert shape.parameters == pytest.approx(132e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(36e9, rel=0.02)


def test_the_language_part_alone_counts_at_any_depth():
    vision = {"vision_config": {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8}}
    for nested in (
        {"text_config": QWEN3},
        {"thinker_config": {"text_config": QWEN3, **vision}, "talker_config": {"text_config": {}}},
        {"llm_config": QWEN3, "num_hidden_layers": 27, "sliding_window": 9, "head_dim": 7},
    ):
        shape = read(model_type="some_vl", **nested, **vision)
        assert shape.kv_bytes_per_token() == 8 * ONE


def test_a_multimodal_config_takes_absent_fields_from_its_model_class():
    """As in gemma-3-4b: the language part has no heads, head size and vocabulary."""
    part = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    part |= {"model_type": "gemma3_text", "sliding_window": 1024}
    shape = read(model_type="gemma3", text_config=part, vision_config={"num_attention_heads": 16})
    assert shape.kv_bytes_per_token() == 5 * 4 * 512 * B
    assert shape.window_bytes() == 29 * 4 * 512 * B * 1024


REFUSED = [
    ({"num_key_value_heads": ..., "model_type": "own"}, "has no num_key_value_heads, .*'own'"),
    ({"n_kv_heads": 4}, "num_key_value_heads 2 and n_kv_heads 4: two names .* disagree"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3: not a divisor of num_attention_heads 4"),
    (
        {"head_dim": ..., "num_attention_heads": 6, "model_type": "llama"},
        "has no head_dim, and hidden",
    ),
    (
        {"num_key_value_heads": ..., "model_type": "own", "gqa_groups": 2},
        "has no num_key_value_heads, .*gqa_groups 2: not understood",
    ),
    (
        {"head_dim": ..., "num_attention_heads": 6, "size_per_head": 16, "model_type": "llama"},
        "has no head_dim, and .*size_per_head 16: not understood",
    ),
    ({"head_dim": ..., "model_type": "llama", "attention_head_size": 16}, "attention_head_size"),
    ({"head_dim": ..., "model_type": "llama", "qk_head_dim": 16}, "qk_head_dim: 16"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: 'fp8'"),
    ({"quantization_config": {"kv_cache_group": ["*k_proj"]}}, "kv_cache_group: .*use --dtype"),
    ({"kv_compression_factor": 4}, "kv_compression_factor: 4: this field shapes the KV state"),
    ({"kv_sharing_layers": [[1, 2]]}, "kv_sharing_layers"),
    ({"use_cla": True, "cla_share_factor": 2}, "use_cla"),
    ({"local_window": 64}, "local_window: 64"),
    ({"chunk_size": 64}, "chunk_size: 64"),
    ({"tie_kv": True}, "tie_kv: True"),
    ({"kv_kept_tokens": 64}, "kv_kept_tokens: 64"),
    ({"hybrid_attention": True}, "hybrid_attention: True"),
    ({"attention_type": "mla"}, "attention_type: 'mla'"),
    ({"attention_chunk_size": 64}, "attention_chunk_size: 64"),
    ({"index_head_dim": 64}, "index_head_dim: 64"),
    ({"linear_attention_config": {"heads": 2}}, "linear_attention_config"),
    ({"num_memory_slots": 64}, "num_memory_slots"),
    ({"sparse_attention_config": {"use_sparse_attention": True}}, "has no sparse_attention_freq"),
    ({"cross_attention_layers": [8]}, "cross_attention_layers: .8.: there are 8 layers"),
    ({"layer_types": ["full_attention"] * 9}, "layer_types: 9 entries for num_hidden_layers 8"),
    (
        {"per_layer_config": {"8": {"head_dim": 8}}},
        "per_layer_config: .*'8' is not one of 8 layers",
    ),
    ({"per_layer_config": {"0": {"kv_rank": 8}}}, "per_layer_config: kv_rank: 8: this field"),
    ({"per_layer_config": {"0": {"skip": ["attention"]}}}, "per_layer_config: .*skips parts"),
    ({"layer_group_size": 4}, "layer_group_size: 4: not known for model_type 'qwen3'"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder: True"),
    (
        {"model_type": "recurrent_gemma", "block_types": ["recurrent"], "lru_width": 64},
        "model_type recurrent_gemma, block_types, lru_width: keeps gated linear",
    ),
    (
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 3, "type": "int"}}},
        "kv_cache_scheme: .*not a known type of the KV state",
    ),
    ({"quantization_config": {"kv_cache_quant_algo": "EXL3"}}, "kv_cache_quant_algo: 'EXL3'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_field_that_shapes_kv_state_and_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=f"^mine: .*{message}"):
        read(**{**QWEN3, **change})


@pytest.mark.parametrize("name", ["head_dim_not_divisible", "nested_vision_heads_at_root"])
def test_a_size_that_the_config_does_not_give_is_not_guessed(name):
    missing = (
        "head_dim.*1792.*24" if "head" in name[:4] else "text_config: has no num_attention_heads"
    )
    with pytest.raises(ConfigError, match=missing):
        load_model(str(CONFIGS / f"{name}.json"))


def test_an_unknown_part_is_named_if_the_fields_are_not_found():
    config = {"model_type": "own", "backbone": json.loads(json.dumps(QWEN3))}
    with pytest.raises(ConfigError, match=r"has no num_hidden_layers.*given: backbone"):
        read(**config)
    elm = {"model_type": "openelm", "num_transformer_layers": 2, "num_kv_heads": [3, 4]}
    with pytest.raises(ConfigError, match=r"given: num_transformer_layers, num_kv_heads"):
        read(**elm)
    with pytest.raises(ConfigError, match="mine: backbone: has layers of its own, beside those"):
        read(**QWEN3, backbone=QWEN3)
    with pytest.raises(ConfigError, match=r"text_config: has no per_layer_config.* at the root"):
        read(text_config=QWEN3, per_layer_config={"1": {"head_dim": 4}})
