"""What is known of model types: other names of fields, defaults of absent fields, kinds of layers.

The table comes from the config classes of transformers (`tools/model_types.py` writes it). Types
that only vLLM or a publisher's own code defines are here, and what the classes do not say.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from holdfast.sim.shipped import DATA

ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_kv_heads",
        "n_kv_head",
        "n_head_kv",
        "num_heads_kv",
        "num_attention_groups",
        "num_query_groups",
        "num_key_value_heads_per_layer",
    ),
    "head_dim": (
        *("kv_channels", "attention_head_dim", "head_size"),
        *("hidden_size_per_head", "d_head", "dim_head"),
    ),
    "sliding_window": ("sliding_window_size",),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff"),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_position_embedding",
    ),
}
"""Standard field name to the names that publishers use for it, in any model type."""

SAME_TYPES = {
    "RefinedWebModel": "falcon",
    "kimi_k2": "deepseek_v3",
    "minimax_m3": "minimax_m3_vl_text",
    "minimax_m3_text": "minimax_m3_vl_text",
    "mimo_v2": "mimo_v2_flash",
}
"""Model types that differ from another type in nothing that counts here."""

_OF_VLLM: dict[str, dict[str, Any]] = {
    "bailing_moe_linear": {"defaults": {"layer_group_size": 1}},
    "bailing_hybrid": {"defaults": {"layer_group_size": 1}},
    "step3_text": {"defaults": {"num_key_value_heads": 1, "head_dim": 256}},
    "step3_vl": {"text": "step3_text"},
    # Publishers' own classes with a KV head for each query head.
    **{name: {} for name in ("baichuan", "internlm", "orion", "qwen", "xverse")},
    "RefinedWeb": {"defaults": {"new_decoder_architecture": True}},
}
"""Types that vLLM and publishers define, with the defaults of their config classes."""

_NOT_IN_CLASSES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 512},
    "gemma4_unified_text": {"global_head_dim": 512},
    "diffusion_gemma_text": {"global_head_dim": 512},
}
"""Defaults that a class takes from its arguments, without a field."""

_HARMLESS = {
    "bamba": "layer_types",
    "gpt_neo": "attention_types attention_layers window_size",  # local layers keep all tokens too
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text"), "compression_ratio"),
    "lfm2": "block_dim block_ff_dim conv_dim conv_dim_out num_heads",
    "mimo_v2_flash": "attention_chunk_size",  # not used by the model
    "minimax_m3_vl_text": "index_head_dim index_n_heads index_block_size index_topk_blocks",
    "minimax": "block_size full_attn_alpha_factor linear_attn_alpha_factor full_attn_beta_factor"
    " linear_attn_beta_factor",
    "step3p5": "num_sliding_attention_heads",
    "zamba": "attention_hidden_size num_mem_blocks kv_channels use_shared_attention_adapter",
    "zamba2": "attention_hidden_size num_mem_blocks kv_channels use_shared_attention_adapter",
}
"""Fields of a model type that look as if they shaped the KV state and do not."""

NOT_MODELLED = {
    "blt": "several stacks of layers",
    "doge": "a window that moves by content",
    "glm5_next_text": "compressed keys of an indexer",
    "hrm_text": "layers that run several times, each with its own state",
    "inkling_text": "several convolutions a layer",
    "minicpm3": "a latent that engines expand, so it depends on the engine",
    "qwen4_exp_text": "compressed keys of an indexer",
    "recurrent_gemma": "gated linear recurrences",
    "reformer": "hashed buckets of keys",
    "rwkv": "recurrent states alone",
    "xlnet": "memories of segments",
    "xlstm": "recurrent states alone",
    "zaya": "compressed convolutional attention",
}
"""Model types whose KV state is not modelled, with what they keep."""


class ModelType(msgspec.Struct, frozen=True):
    """What is known of a model type.

    `names` maps standard field names to those that its class writes. `defaults` are the values of
    absent fields, by their standard names. `cycle` are the kinds of layers that repeat if the
    config lists none, and `last` is that of the last layer. The layers of an `irregular` type do
    not repeat, so the config must list them. `text` is the type of its language part. `harmless`
    are fields that do not shape the KV state of this type, whatever their name.
    """

    names: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    cycle: tuple[str, ...] = ()
    last: str = ""
    irregular: bool = False
    text: str = ""
    harmless: frozenset[str] = frozenset()


@cache
def model_types() -> dict[str, ModelType]:
    """Return all types that are known, by name."""
    data = msgspec.json.decode((DATA / "model_types.json").read_bytes())
    for name, defaults in _NOT_IN_CLASSES.items():
        data[name].setdefault("defaults", {}).update(defaults)
    for name, fields in _HARMLESS.items():
        data[name]["harmless"] = fields.split()
    return msgspec.convert({**data, **_OF_VLLM}, dict[str, ModelType])


def find_type(name: str) -> ModelType | None:
    """Return what is known of a model type; None if nothing is."""
    return model_types().get(SAME_TYPES.get(name, name))
