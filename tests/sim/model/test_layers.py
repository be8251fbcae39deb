"""Which layers of a published config see all of a context, and what is not guessed at."""

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.model.catalogue import read_model
from holdfast.sim.model.fields import Fields
from holdfast.sim.profile import shipped

SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 10,
    "intermediate_size": 64,
}
A_LAYER = 2 * 2 * 32 * 2
"""Bytes that a token takes in one layer of SMALL."""

GEMMA2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256_000,
    "intermediate_size": 14_336,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "intermediate_size": 6912,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32_768,
}
PHI4_MINI = {
    "model_type": "phi3",
    "num_hidden_layers": 32,
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "vocab_size": 200_064,
    "intermediate_size": 8192,
    "sliding_window": 262_144,
    "max_position_embeddings": 131_072,
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151_936,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
}
JAMBA_MINI = {
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65_536,
    "intermediate_size": 14_336,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
}
BAMBA_9B = {
    "model_type": "bamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "intermediate_size": 14_336,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}
GRANITE_4_H_SMALL = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100_352,
    "tie_word_embeddings": True,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}
# Worked out by hand: full layers, bytes a token, bytes of all windows, bytes of all states.
PUBLISHED = [
    (GEMMA2_9B, 21, 172_032, 21 * 2 * 8 * 256 * 2 * 4096, 0),
    (GEMMA3_1B, 4, 4_096, 22 * 2 * 256 * 2 * 512, 0),
    (PHI4_MINI, 32, 131_072, 0, 0),
    (QWEN3_NEXT_80B, 12, 24_576, 0, 36 * 2 * (32 * 128 * 128 + (2 * 2048 + 4096) * 3)),
    (JAMBA_MINI, 4, 16_384, 0, 28 * 2 * 8192 * (16 + 3)),
    (BAMBA_9B, 3, 12_288, 0, 29 * 2 * (8192 * 128 + (8192 + 2 * 128) * 3)),
    (GRANITE_4_H_SMALL, 4, 16_384, 0, 36 * 2 * (8192 * 128 + (8192 + 2 * 128) * 3)),
]


@pytest.mark.parametrize(
    ("config", "full", "a_token", "windows", "states"),
    PUBLISHED,
    ids=["gemma2", "gemma3", "phi4", "qwen3-next", "jamba", "bamba", "granite-4-h"],
)
def test_full_window_and_state_layers_are_distinguished(config, full, a_token, windows, states):
    shape = read_model(Fields(config, "published"))
    assert sum(part.layers for part in shape.attention if part.kind == "full") == full
    assert shape.kv_bytes_per_token() == a_token
    assert shape.window_bytes() == windows
    assert shape.state_bytes() == states


def test_hybrids_have_the_parameters_that_are_published():
    for config, billions, active in (
        (QWEN3_NEXT_80B, 80, 3.7),
        (JAMBA_MINI, 51.6, 12),
        (BAMBA_9B, 9.8, 9.8),
        (GRANITE_4_H_SMALL, 32, 9),
    ):
        shape = read_model(Fields(config, "hybrid"))
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)
        assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


FULL = [
    ({"sliding_window": 64}, 0),
    ({"sliding_window": 64, "use_sliding_window": False}, 8),
    ({"sliding_window": 64, "model_type": "qwen2"}, 8),  # its windows are off unless turned on
    ({"sliding_window": 64, "max_position_embeddings": 64}, 8),
    ({"sliding_window": 64, "max_position_embeddings": 65}, 0),
    ({"sliding_window": 64, "_sliding_window_pattern": 3}, 2),
    ({"sliding_window": 64, "sliding_window_pattern": 1}, 8),
    ({"sliding_window": None, "sliding_window_pattern": "LLLG"}, 8),
    ({"sliding_window": 64, "model_type": "gemma3_text"}, 1),
    ({"sliding_window": 64, "model_type": "cohere2"}, 2),
    ({"sliding_window": 64, "model_type": "gemma2", "layer_types": ["full_attention"] * 8}, 8),
    ({"attn_type_list": [1] * 8}, 8),
]


@pytest.mark.parametrize(("said", "full"), FULL)
def test_windowed_layers_follow_the_config(said, full):
    shape = read_model(Fields({**SMALL, **said}, "mine"))
    assert shape.kv_bytes_per_token() == full * A_LAYER
    assert shape.window_bytes() == (8 - full) * A_LAYER * 64


def test_layers_block_type_lists_the_kinds_of_layers():
    kinds = ["attention"] * 3 + ["sliding_attention"] * 5
    shape = read_model(Fields({**SMALL, "layers_block_type": kinds, "sliding_window": 64}, "mine"))
    assert shape.kv_bytes_per_token() == 3 * A_LAYER


def test_layers_that_share_kv_of_other_layers_store_none():
    kinds = ["full_attention", "sliding_attention"] * 4
    said = {"layer_types": kinds, "sliding_window": 64, "num_kv_shared_layers": 3}
    shape = read_model(Fields({**SMALL, **said}, "mine"))
    assert shape.kv_bytes_per_token() == 3 * A_LAYER
    assert shape.window_bytes() == 2 * A_LAYER * 64
    with pytest.raises(ConfigError, match="num_kv_shared_layers: 8 of 8 layers"):
        read_model(Fields({**SMALL, "num_kv_shared_layers": 8}, "mine"))


REMEDY = "write layer_types into the config, one of full_attention"
REFUSED = [
    ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern: 'LLLG'"),
    ({"sliding_window": 64, "sliding_window_pattern": 0}, "sliding_window_pattern: 0"),
    ({"full_attention_interval": True}, "full_attention_interval: True"),
    ({"attn_layer_period": 6, "attn_layer_offset": 4, "model_type": "zamba"}, "attn_layer_period"),
    ({"block_types": ["recurrent", "attention"]}, "block_types"),
    ({"_block_types": ["recurrent"]}, "_block_types"),
    ({"attn_type_list": [0, 1] * 4}, "attn_type_list"),
    ({"attn_layer_indices": [3], "model_type": "zamba"}, "attn_layer_indices"),
    ({"attn_layer_indices": [8], "model_type": "bamba"}, "attn_layer_indices: .8.: there are 8"),
    ({"block_configs": [{}]}, "block_configs"),
    ({"mamba_d_state": 16}, "mamba_d_state: 16: says that layers differ, but not how"),
    ({"linear_num_value_heads": 2}, "linear_num_value_heads"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED)
def test_hybrids_that_are_not_understood_are_refused_by_field(said, message):
    with pytest.raises(ConfigError, match=f"^mine: {message}.*{REMEDY}"):
        read_model(Fields({**SMALL, **said}, "mine"))


def test_unknown_kinds_of_blocks_are_refused():
    with pytest.raises(ConfigError, match="mine: layers_block_type: 'rwkv' is no kind of layer"):
        read_model(Fields({**SMALL, "layers_block_type": ["mamba", "rwkv"] * 4}, "mine"))


def test_a_simulation_refuses_a_model_whose_contexts_do_not_grow():
    ladder = parse_ladder({"tiers": [{"kind": "host", "capacity": "1 GiB"}]})
    with pytest.raises(ConfigError, match=r"--model small: 0 bytes a token: .*name another model"):
        resolve(ladder, shipped(), 64, read_model(Fields({**SMALL, "sliding_window": 64}, "small")))
