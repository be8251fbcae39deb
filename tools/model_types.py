"""Rewrite the table of model types from the config classes of the installed transformers.

For each type: the names that its class writes for standard fields, the class's defaults, the kinds
of layers that the class fills in, and the type of its text part.
"""

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "src/holdfast/sim/data/model_types.json"
_NAMES = """
vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads num_kv_heads
head_dim attention_head_dim v_head_dim intermediate_size max_position_embeddings
tie_word_embeddings is_encoder_decoder multi_query new_decoder_architecture sliding_window
use_sliding_window max_window_layers attention_chunk_size num_kv_shared_layers
cross_attention_layers kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim index_head_dim
index_n_heads index_topk index_topk_blocks index_block_size swa_num_attention_heads
swa_num_key_value_heads swa_head_dim linear_conv_kernel_dim linear_key_head_dim
linear_value_head_dim linear_num_key_heads linear_num_value_heads conv_L_cache conv_kernel
attn_layer_period attn_layer_offset mamba_d_conv mamba_d_state mamba_expand mamba_n_heads
mamba_d_head mamba_n_groups mamba_dt_rank mamba_d_ssm mamba_headdim mamba_ngroups n_mamba_heads
mamba_num_heads mamba_head_dim n_groups ssm_state_size mamba_ssm_cache_dtype mamba_ssm_dtype
expand hidden_act activation_function num_local_experts num_experts n_routed_experts
num_experts_per_tok moe_num_experts moe_k moe_topk moe_intermediate_size n_shared_experts
num_shared_experts moe_num_shared_experts shared_expert_intermediate_size
shared_intermediate_size moe_layer_freq decoder_sparse_step interleave_moe_layer_step
first_k_dense_replace expert_layer_period expert_layer_offset intermediate_size_mlp
compress_rates linear_num_heads linear_head_dim
"""
FIELDS = frozenset(_NAMES.split())
"""Standard fields whose class defaults the arithmetic uses."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TRIALS = (25, 24, 36)
"""Numbers of layers at which the layer types that a class fills in are looked at."""

PERIOD_MAX = 12


def cycle(config_class: type[Any]) -> dict[str, Any]:
    """Return the shortest period of the layer types that a class fills in, and a fixed last one.

    Empty if the class fills in nothing, or full attention as long as no field turns windows on.
    `irregular` if the config must list the layers, because there is no period.
    """
    found: list[list[str]] = []
    for layers in TRIALS:
        try:
            types = list(config_class(num_hidden_layers=layers).layer_types)
        except Exception:  # noqa: BLE001  # many classes have no layer types or check other fields
            types = list(getattr(config_class(), "layer_types", None) or [])
        found.append(types)
    if {*found[0]} <= {"full_attention"}:
        return {"cycle": ["full_attention"]} if ignores_window(config_class) else {}
    for period in range(1, PERIOD_MAX + 1):
        start = found[0][:period]
        repeated = [(start * layers)[:layers] for layers in TRIALS]
        if all(a[:-1] == b[:-1] for a, b in zip(repeated, found, strict=True)):
            lasts = {types[-1] for types in found}
            fixed = repeated != found and len(lasts) == 1
            return {"cycle": start, "last": lasts.pop() if fixed else ""}
    return {"irregular": True}


def ignores_window(config_class: type[Any]) -> bool:
    """Return whether a class fills in full attention even if `sliding_window` is given."""
    try:
        config = config_class(sliding_window=9)
    except Exception:  # noqa: BLE001  # the class has no such field
        return False
    switches = ("use_sliding_window", "max_window_layers")
    return (
        bool(getattr(config, "layer_types", None))
        and not any(hasattr(config, switch) for switch in switches)
        and {*config.layer_types} == {"full_attention"}
    )


def entry(config_class: type[Any]) -> dict[str, Any]:
    """Return what one config class does with its fields."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if isinstance(field.default, int | str | dict | list) and field.default is not False
    }
    written = {k: v for k, v in config_class.attribute_map.items() if k in FIELDS and k != v}
    for standard, name in written.items():
        if name in defaults:
            defaults[standard] = defaults.pop(name)
    found = {
        "names": written,
        "defaults": {k: v for k, v in sorted(defaults.items()) if k in FIELDS},
        **cycle(config_class),
    }
    return {key: value for key, value in found.items() if value}


def model_types() -> dict[str, dict[str, Any]]:
    """Return the entry of every causal or multimodal language model type that can be built."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    table: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        try:
            whole = CONFIG_MAPPING[name]
            text = whole().get_text_config(decoder=True)
        except Exception as error:  # noqa: BLE001  # composite classes need parts without defaults
            print(f"{name}: left out: {error!r:.100}", file=sys.stderr)
            continue
        part = type(text)
        if part is whole:
            table[name] = entry(whole)
        else:
            table[name] = {"text": part.model_type}
            table.setdefault(part.model_type, entry(part))
    return dict(sorted(table.items()))


def text_of(table: dict[str, dict[str, Any]]) -> str:
    """Return the table as JSON, one type a line."""
    lines = [f'"{name}": {json.dumps(one, sort_keys=True)}' for name, one in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Rewrite the table."""
    warnings.simplefilter("ignore")
    TABLE.write_text(text_of(model_types()))


if __name__ == "__main__":
    main()
