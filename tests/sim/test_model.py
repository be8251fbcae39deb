"""The arithmetic of 25 published configs, against figures worked out by hand from them."""

import json
from importlib import resources

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.sim.model.catalogue import known_models, load_model, read_model
from holdfast.sim.model.fields import Fields
from holdfast.sim.model.shape import Attention, dtype_bytes

# KV bytes per token in bf16, without index keys; `2 * L * H_kv * d * 2` or `L * (r + rope) * 2`.
PER_TOKEN = {
    "Llama-3.1-8B": 131_072,
    "Llama-3.1-70B": 327_680,
    "Llama-3.1-405B": 516_096,
    "Llama-4-Maverick-17B-128E": 49_152,  # 12 of 48 layers see all, if each fourth does
    "Qwen3-8B": 147_456,
    "Qwen3-32B": 262_144,
    "Qwen3-30B-A3B": 98_304,
    "Qwen3-235B-A22B": 192_512,
    "Qwen3-Coder-480B-A35B": 253_952,
    "Qwen3.5-397B-A17B": 30_720,
    "DeepSeek-V3": 70_272,
    "DeepSeek-V3.2": 70_272,
    "DeepSeek-V4-Pro": 30 * 1024 / 4 + 31 * 1024 / 128,
    "DeepSeek-V4-Flash": 21 * 1024 / 4 + 20 * 1024 / 128,
    "Kimi-K2": 70_272,
    "Kimi-K2.5": 70_272,
    "Kimi-K3": 27_648,
    "GLM-5": 89_856,
    "gpt-oss-120b": 36_864,
    "gpt-oss-20b": 24_576,
    "MiniMax-M2.5": 253_952,
    "Mixtral-8x22B-v0.1": 229_376,
    "MiMo-V2-Flash": 23_040,
    "gemma-4-26B-A4B": 20_480,
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 8_192,
}
# Bytes of index keys per token: 132 for each layer with an indexer, for 4 tokens in DeepSeek-V4.
INDEX = {
    "DeepSeek-V3.2": 61 * 132,
    "GLM-5": 78 * 132,
    "DeepSeek-V4-Pro": 30 * 132 / 4,
    "DeepSeek-V4-Flash": 21 * 132 / 4,
}
# Bytes per token in fp8 where rows have scales and positions in bf16, with index keys.
PACKED = {
    "DeepSeek-V3.2": 61 * (656 + 132),
    "GLM-5": 78 * (656 + 132),
    "DeepSeek-V4-Pro": 30 * (584 + 132) / 4 + 31 * 584 / 128,
    "DeepSeek-V4-Flash": 21 * (584 + 132) / 4 + 20 * 584 / 128,
}
WINDOW_MB = {
    "gpt-oss-120b": 4.7,
    "MiMo-V2-Flash": 25.6,
    "gemma-4-26B-A4B": 209.7,
    "Llama-4-Maverick-17B-128E": 1208.0,
    "gpt-oss-20b": 3.146,
    "DeepSeek-V4-Pro": 8.0,
    "DeepSeek-V4-Flash": 5.6,
}
STATE_ELEMENTS = {  # in millions; convolutions apart
    "Qwen3.5-397B-A17B": 47.2,
    "Kimi-K3": 108.5,
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 41.9,
}
# Billions of parameters, all and active, as publishers round them.
PUBLISHED = {
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3.1-70B": (70.6, 70.6),
    "Llama-3.1-405B": (405.9, 405.9),
    "Llama-4-Maverick-17B-128E": (400, 17),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Qwen3-Coder-480B-A35B": (480, 35),
    "Qwen3.5-397B-A17B": (397, 17),
    "DeepSeek-V3": (671, 37),
    "Kimi-K2": (1026, 32),
    "gpt-oss-120b": (116.8, 5.7),  # published 5.1 leaves the embedding out: 0.58
    "gpt-oss-20b": (20.9, 4.2),  # published 3.6, likewise
    "MiniMax-M2.5": (230, 10.6),
    "Mixtral-8x22B-v0.1": (141, 39),
    "MiMo-V2-Flash": (309, 15),
    "gemma-4-26B-A4B": (25.2, 3.8),
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120, 12.7),
}


def test_every_shipped_model_has_an_expected_value():
    assert len(known_models()) == 25
    assert {load_model(name).name for name in PER_TOKEN} == set(known_models())


@pytest.mark.parametrize("name", PER_TOKEN)
def test_bytes_per_token_are_exact(name):
    shape = load_model(name)
    assert shape.kv_bytes_per_token() == PER_TOKEN[name] + INDEX.get(name, 0)
    assert shape.kv_bytes_per_token("fp8") == PACKED.get(name, PER_TOKEN[name] / 2)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_window_and_state_sizes_are_exact(name):
    shape = load_model(name)
    window = WINDOW_MB.get(name, 0)
    assert shape.window_bytes() / 1e6 == pytest.approx(window, rel=0.01)
    states = sum(part.layers * part.elements for part in shape.attention if part.kind == "state")
    assert states / 1e6 == pytest.approx(STATE_ELEMENTS.get(name, 0), rel=0.002)
    assert shape.recurrent == (name in STATE_ELEMENTS)


def test_a_checkpoint_is_kept_in_the_type_that_the_config_names():
    assert load_model("Qwen3.5").state_bytes() == pytest.approx(189e6, rel=0.03)  # fp32
    # Kimi Delta Attention: fp32 by default in engines; its convolutions are in bf16.
    assert load_model("Kimi-K3").state_bytes() == 69 * (96 * 128**2 * 4 + 3 * 3 * 96 * 128 * 2)
    assert load_model("Nemotron-3").state_bytes() == pytest.approx(168e6, rel=0.03)  # fp32


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_as_published(name, billions):
    shape = load_model(name)
    assert shape.parameters / 1e9 == pytest.approx(billions[0], rel=0.02)
    assert shape.active_parameters / 1e9 == pytest.approx(billions[1], rel=0.05)


def test_weights_take_what_their_precision_says():
    assert load_model("Llama-3.1-70B").weights_bytes / 1e9 == pytest.approx(141, rel=0.01)
    assert load_model("DeepSeek-V3").weights_bytes / 1e9 == pytest.approx(671, rel=0.03)
    assert load_model("gpt-oss-120b").weights_bytes / 1e9 == pytest.approx(65.3, rel=0.02)
    assert load_model("Kimi-K2.5").weights_bytes / 1e9 == pytest.approx(594, rel=0.03)


# Break-even bandwidth in GB/s: KV bytes over the time to prefill them on 8 H100 at half their peak.
BREAK_EVEN = {
    "Llama-3.1-8B": (31.2, 28.5, 21.0, 10.3),
    "Llama-3.1-70B": (9.0, 8.5, 7.0, 4.1),
    "Llama-3.1-405B": (2.5, 2.4, 2.2, 1.5),
    "Qwen3-30B-A3B": (52.5, 39.6, 20.0, 6.7),
    "Qwen3-235B-A22B": (16.2, 13.5, 8.1, 3.1),
    "Qwen3-Coder-480B-A35B": (13.7, 12.2, 8.4, 3.7),
    "gpt-oss-120b": (13.9, 12.8, 9.7, 4.9),
    "DeepSeek-V3": (3.5, 2.9, 1.8, 0.7),
    "Kimi-K2": (4.2, 3.7, 2.6, 1.2),
}


@pytest.mark.parametrize("name", BREAK_EVEN)
def test_the_break_even_bandwidth_matches_the_published_table(name):
    """Within 5 %; gpt-oss with the active parameters of its card, which leave the embedding out."""
    shape = load_model(name)
    if name == "gpt-oss-120b":
        shape = msgspec.structs.replace(shape, active_parameters=5.13e9)
    for tokens, expected in zip((2048, 8192, 32768, 131072), BREAK_EVEN[name], strict=True):
        seconds = shape.prefill_flop(tokens) / (8 * 989e12 * 0.5)
        found = tokens * shape.kv_bytes_per_token() / seconds / 1e9
        assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", known_models())
def test_shipped_configs_hold_only_what_is_read(name):
    file = resources.files("holdfast.sim") / "data" / "models" / f"{name.replace('/', '--')}.json"
    config = json.loads(file.read_text())
    fields = Fields(config, name)
    read_model(fields)
    assert set(config.get("text_config", config)) <= fields.asked


@given(
    st.sampled_from(["DeepSeek-V3.2", "DeepSeek-V4-Pro", "gpt-oss-20b", "Maverick", "Qwen3-8B"]),
    st.integers(1, 40_000),
    st.integers(0, 40_000),
)
def test_prefill_in_two_parts_costs_what_it_costs_in_one(name, first, second):
    shape = load_model(name)
    parts = shape.prefill_flop(first) + shape.prefill_flop(second, first)
    assert parts == pytest.approx(shape.prefill_flop(first + second), rel=1e-9)


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_the_closed_form_of_attention_pairs_equals_a_plain_count(new, context):
    window = Attention(kind="window", layers=1, elements=1, span=700)
    chunk = Attention(kind="chunk", layers=1, elements=1, span=700)
    sparse = Attention(kind="full", layers=1, elements=1, top_k=512)
    positions = range(context, context + new)
    # The closed forms count half of a token's pair with itself, as n * n / 2 does.
    assert window.pairs(new, context) == pytest.approx(
        sum(min(p + 0.5, 700) for p in positions), rel=1e-3, abs=1
    )
    assert chunk.pairs(new, context) == pytest.approx(sum(p % 700 + 0.5 for p in positions))
    assert sparse.pairs(new, context) == pytest.approx(
        sum(min(p + 0.5, 512) for p in positions), rel=1e-3, abs=1
    )


def test_a_context_takes_its_growing_part_its_windows_and_its_states():
    gpt = load_model("gpt-oss-120b")
    assert gpt.context_bytes(64) == 64 * 36 * 2048  # within the window all layers grow
    assert gpt.context_bytes(100_000) == 100_000 * 36_864 + gpt.fixed_bytes()
    assert load_model("Nemotron-3").context_bytes(1) > 168e6


@pytest.mark.parametrize(
    "name",
    ["meta-llama/Meta-Llama-3.1-70B", "Meta-Llama-3.1-70B", "llama-3.1-70b", "3.1-70b"],
)
def test_a_model_has_short_names(name):
    assert load_model(name).name == "meta-llama/Meta-Llama-3.1-70B"


def test_an_unknown_model_is_refused_with_similar_names():
    with pytest.raises(ConfigError, match=r"Llama-3\.3-70B.*Meta-Llama-3\.1-70B"):
        load_model("Llama-3.3-70B")
    with pytest.raises(ConfigError, match=r"close: .*Kimi-K2.*Kimi-K3"):
        load_model("kimi")


def test_a_model_can_be_read_from_a_config_file_or_its_folder(tmp_path):
    small = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "intermediate_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(small))
    for path in (tmp_path, tmp_path / "config.json"):
        assert load_model(str(path)).kv_bytes_per_token() == 2 * 4 * 2 * 32 * 2
    windowed = read_model(Fields({**small, "sliding_window": 64}, "windowed"))
    assert (windowed.kv_bytes_per_token(), windowed.window_bytes()) == (0, 4 * 64 * 2 * 2 * 32 * 2)
    later = {**small, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
    assert read_model(Fields(later, "later")).kv_bytes_per_token() == 3 * 2 * 2 * 32 * 2


BAD = [
    ({"hidden_size": 64}, "num_hidden_layers, num_attention_heads, vocab_size"),
    ({"num_hidden_layers": -1}, "num_hidden_layers: -1: not a whole number"),
    ({"num_attention_heads": 0}, "num_attention_heads: 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: 0: not a whole number from 1"),
    ({"num_key_value_heads": 0}, "num_key_value_heads: 0: not a whole number from 1"),
    ({"head_dim": 0}, "head_dim: 0: not a whole number from 1"),
    ({"num_attention_heads": 65}, "hidden_size 64 is not a multiple of num_attention_heads 65"),
    ({"hidden_size": 0}, "hidden_size 0 is not a multiple"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3: not a divisor of num_attention_heads 2"),
    ({"layer_types": ["full_attention"]}, "layer_types: 1 entries for num_hidden_layers 2"),
    ({"layer_types": ["full_attention", "odd"]}, "'odd' is no kind of layer.*full_attention"),
    ({"kv_lora_rank": 512}, "has no qk_nope_head_dim"),
    ({"num_experts": 8}, "has no num_experts_per_tok or"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_an_incomplete_or_invalid_config_is_refused_with_the_field(change, message):
    base = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "intermediate_size": 64,
    }
    config = change if change == {"hidden_size": 64} else {**base, **change}
    with pytest.raises(ConfigError, match=f"mine: .*{message}"):
        read_model(Fields(config, "mine"))


def test_files_that_are_no_config_are_refused(tmp_path):
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(str(tmp_path / "none.json"))


def test_contexts_and_dtypes_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"40,961 tokens.*at most 40,960"):
        load_model("Qwen3-8B").check_context(40_961)
    with pytest.raises(ConfigError, match="at least 1"):
        load_model("Qwen3-8B").check_context(0)
    with pytest.raises(ConfigError, match=r"fp7.*bf16"):
        dtype_bytes("fp7")
