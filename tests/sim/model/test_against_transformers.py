"""The KV state of small models, against the cache that each model of transformers fills itself."""

import inspect
import json
import math
import runpy
import warnings
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.sim.model.catalogue import known_models, load_model, read_model
from holdfast.sim.model.fields import Fields
from holdfast.sim.model.known_types import find_type
from holdfast.sim.shipped import DATA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# transformers uses parts of torch that warn, while it is imported and while it runs.
pytestmark = pytest.mark.filterwarnings("ignore")

SHORT, LONG = 32, 48
"""Prompts of two lengths, both longer than the window: what grows is told from what does not."""

PARAMETERS_MAX = 30_000_000
LAYERS = 8

SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "decoder_attention_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim"), 24),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 9),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 4096),
    "attention_chunk_size": 12,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_head_dim": 16,
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 6),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "ngroups"), 1),
    "n_mamba_heads": 2,
    "mamba_d_ssm": 128,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 40,
    "num_global_key_value_heads": 1,
    "pad_token_id": 0,
    "o_lora_rank": 16,
    "o_groups": 2,
    "rotary_dim": 8,
    "num_kv_shared_layers": 3,
}
"""Small values of fields, by name; a config class takes those that it knows."""

LATENT = {"head_dim": ..., "num_key_value_heads": 4}
"""For latent attention: the class takes the size of the positions, and as many heads."""

SPECIAL = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "youtu"), LATENT),
    "bamba": {"attn_layer_indices": [2, 5]},
    "dots1": {"sliding_window": None},
    "gemma3n_text": {"activation_sparsity_pattern": None, "laurel_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"] * 2},
    "gemma4_text": {"num_kv_shared_layers": 1},
    "gemma4_unified_text": {"num_kv_shared_layers": 1},
    "helium": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "longcat_flash": {"num_layers": 4, "head_dim": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"] * 2,
        "n_mamba_heads": 4,
        "hybrid_layer_ids": ...,
    },
}
"""What else a type needs to be built small."""

QUICK = (
    *("bamba", "deepseek_v32", "falcon", "gemma3n_text", "gemma4_text", "kimi_linear"),
    *("llama4_text", "mimo_v2_flash", "qwen3_next"),
)
"""A type for each way to keep KV state."""

COUNTED = ("keys", "values", "indexer_keys", "compressed_kv")
"""Tensors of a layer's cache with an entry for each token, or for a number of tokens."""


def small_config(name):
    """A config of this type with few and small layers, all sizes different."""
    config_class = CONFIG_MAPPING[name]
    known = {*config_class().to_dict(), *inspect.signature(config_class).parameters}
    known |= {"global_head_dim", "num_global_key_value_heads"} if "gemma4" in name else set()
    given = {key: value for key, value in SMALL.items() if key in known}
    given |= dict.fromkeys({"layer_types", "mlp_layer_types", "no_rope_layers"} & known)
    given |= SPECIAL.get(name, {})
    return config_class(**{key: value for key, value in given.items() if value is not ...})


def class_of(config):
    """The class with the language head: the first one if a type has several."""
    found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple | list) else found


def check_size(config):
    """Raise MemoryError for a config whose parts have not been made small."""
    with torch.device("meta"):
        count = sum(part.numel() for part in class_of(config)(config).parameters())
    if count > PARAMETERS_MAX:
        raise MemoryError(f"{count:,} parameters")


def filled(config, tokens):
    """The tensors of each layer's cache after prompts of these lengths, by name.

    Also whether the cache keeps the states of linear attention elsewhere.
    """
    model_class = class_of(config)
    model = model_class(config).eval().to(torch.bfloat16)
    layers = []
    with torch.no_grad():
        for length in tokens:
            out = model(input_ids=torch.arange(3, 3 + length)[None], use_cache=True)
            cache = getattr(out, "past_key_values", None)
            cache = out.cache_params if cache is None else cache
            layers.append([dict(tensors(vars(layer))) for layer in cache.layers])
    return layers, hasattr(cache, "linear_cache")


def tensors(values):
    """The tensors in a layer's attributes, in its dictionaries and in its lists."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 3:
            yield name, value
        elif isinstance(value, dict):
            yield from tensors({f"{name}.{key}": inner for key, inner in value.items()})
        elif isinstance(value, list):
            yield from tensors({f"{name}.{key}": inner for key, inner in enumerate(value)})


def elements(layer, names):
    return sum(math.prod(v.shape) for k, v in layer.items() if k.split(".")[0] in names)


def compare(config, kinds=("whole", "short")):
    """Compare what the model's cache holds with what its config says, in elements."""
    (short, long), elsewhere = filled(config, (SHORT, LONG))
    counted = [
        (elements(a, COUNTED), elements(b, COUNTED)) for a, b in zip(short, long, strict=True)
    ]
    growing = sum(b - a for a, b in counted) / (LONG - SHORT)
    bounded = sum(b for a, b in counted if a == b)
    recurrent = sum(elements(layer, ("recurrent_states",)) for layer in long)
    convolved = sum(elements(layer, ("conv_states",)) for layer in long)
    for kind in kinds:
        parts = read_model(Fields(written(config, kind), kind)).attention
        states = [part for part in parts if part.kind == "state"]
        bound = [part for part in parts if part.kind in ("window", "chunk")]
        assert growing == sum(
            part.layers * (part.elements + part.index_elements) / part.compression
            for part in parts
            if part.kind == "full"
        )
        # The last token is not part of a window that the next token sees.
        assert bounded == sum(p.layers * p.elements * (p.span - 1) for p in bound if p.span < SHORT)
        if not elsewhere:
            assert recurrent == sum(part.layers * part.elements for part in states)
        # Engines keep one column less than transformers, which is a column for each tap.
        taps = 3 if config.model_type.startswith("lfm2") else 4
        kept = sum(part.layers * part.convolution_elements for part in states)
        assert convolved * (taps - 1) == kept * taps


def written(config, kind):
    """The config as transformers saves it, or only what differs from its class's defaults."""
    whole = config.to_dict()
    if kind == "whole":
        return whole
    default = type(config)().to_dict()
    filled_in = {"layer_types", "mlp_layer_types", "layers_block_type", "per_layer_config"}
    if find_type(config.model_type).irregular or "layer_types" in SPECIAL.get(
        config.model_type, {}
    ):
        filled_in = {"mlp_layer_types"}
    short = {
        key: value
        for key, value in whole.items()
        if key == "model_type" or (value != default.get(key) and key not in filled_in)
    }
    if "per_layer_config" in whole:  # made of these
        short["global_head_dim"] = SMALL["global_head_dim"]
    return short


@pytest.mark.parametrize("name", QUICK)
def test_the_cache_of_a_transformers_model_has_the_size_read_from_its_config(name):
    compare(small_config(name))


APART = {"deepseek_v4": "the cache of transformers holds the one vector as key and as value"}
"""Types whose cache holds something else than engines keep; vLLM's pages are compared instead."""


@pytest.mark.soak
def test_every_causal_model_is_understood_or_refused():
    same, refused, wrong, unbuilt = [], [], [], []
    for name in sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*APART}):
        try:
            config = small_config(name)
            check_size(config)
            filled(config, (SHORT,))
        except Exception as error:  # noqa: BLE001  # classes differ in what they need and say
            unbuilt.append(f"{name}: {error!r:.80}")
            continue
        for kind in ("whole", "short"):
            try:
                compare(config, (kind,))
                same.append(f"{name}: {kind}")
            except ConfigError as error:
                refused.append(f"{name}: {error}")
            except (AssertionError, AttributeError) as error:
                wrong.append(f"{name}: {kind}: {error}")
    assert not wrong
    assert len(same) > 200, (refused, unbuilt)


SHIPPED = [name for name in known_models() if "Kimi" not in name]
"""Kimi's own classes come with the models, so transformers cannot save their configs."""


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_resaved_by_transformers_gives_the_same_shape(name):
    file = DATA / "models" / f"{name.replace('/', '--')}.json"
    published = json.loads(file.read_text())
    again = CONFIG_MAPPING[published["model_type"]].from_dict(published).to_dict()
    shape, resaved = load_model(name), read_model(Fields(again, name))
    assert resaved.kv_bytes_per_token() == shape.kv_bytes_per_token()
    assert resaved.fixed_bytes() == shape.fixed_bytes()
    assert resaved.parameters == shape.parameters
    assert resaved.active_parameters == shape.active_parameters


@pytest.mark.soak
def test_the_model_type_table_matches_the_installed_transformers():
    script = Path(__file__).resolve().parents[3] / "tools" / "model_types.py"
    tool = runpy.run_path(str(script))
    written = (DATA / "model_types.json").read_text()
    assert written == tool["text_of"](tool["model_types"]()), f"run {script.name}"
