"""Refuse a config with a field that shapes the KV state and that nothing has read.

A wrong size is worse than none. So a field whose name says that it shapes the KV state is read,
is known not to matter, or is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.errors import ConfigError
from holdfast.sim.model.attention import is_mamba
from holdfast.sim.model.fields import QUANTIZATION, Fields, Section, quantization
from holdfast.sim.model.known_types import ALIASES

_SIZES = re.compile(
    r"(?<!q)kv|key_value|head|window|sliding|swa_|chunk|lora_rank|mamba|ssm|conv|state_|_state|"
    r"linear_|^index|indexer|compress|cross_|share|sparse|attn_|attention_|_attn|group|hybrid|"
    r"pattern|block|recurr|lru|cache|channel|interval|period|per_layer|layers_|_layers|layer_types|"
    r"latent|memory|cca|cla_|qk_|d_?qkv|qkv_(?:dim|size)|v_dim|k_dim|d_k|d_v|local_|global_|retain|evict|delta|cycle|stride",
    re.IGNORECASE,
)
"""Parts of names of numbers, lists and sections that shape the KV state."""

_FLAGS = re.compile(
    r"(?<!q)kv|key_value|multi_query|mqa|gqa|mla|use_cla|yoco|cross_att|cross_layer|sparse_att|"
    r"share\w*_(key|value|att|layer)|(layer|att\w*)_shar|linear_att|hybrid|recurr|sliding|window|"
    r"compress|attn_type|attention_type|mixer|layer_type|cache_dtype",
    re.IGNORECASE,
)
"""Parts of names of switches, words and fractions that shape the KV state."""

_HARMLESS_NAMES = """
head_dim num_key_value_heads num_kv_heads num_attention_heads_per_layer
n_group topk_group hidden_size_per_layer_input vocab_size_per_layer_input
sliding_window max_window_layers block_multiple_of attn_type_list
kda_layers mla_use_nope mla_use_output_gate sparse_block_size sparse_topk_blocks
sparse_num_index_heads sparse_init_block sparse_local_block sparse_disable_index_value
index_local_blocks chunk_size_feed_forward attn_res_block_size share_q_dim
use_bidirectional_attention cross_attention_hidden_size pruned_heads
num_hash_layers max_sequence_length group_norm_size head_dtype full_attn_mod true_head_dim
ignore_index use_memory_efficient_attention
"""
"""Names of such a form that do not shape the KV state, or say what other fields say."""

_LISTED_NAMES = """
sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers full_attention_interval
attn_layer_period attn_layer_offset attn_layer_indices full_attn_idxs hybrid_layer_ids
use_sliding_window no_rope_layer_interval no_rope_layers hybrid_layer_pattern layer_group_size
prefix_dense_sliding_window_pattern attention_chunk_size conv_L_cache
"""

_LISTED = frozenset(_LISTED_NAMES.split())
"""Names of fields that say which layers are of which kind: of no meaning if layers are listed."""

_MAMBA_NAMES = """
mamba_chunk_size mamba_expand mamba_d_head mamba_headdim n_mamba_heads mamba_dt_rank chunk_size
"""
_MAMBA = frozenset(_MAMBA_NAMES.split())
"""Names of fields of Mamba layers that say what other sizes of such layers say."""

_HARMLESS = frozenset(_HARMLESS_NAMES.split())

_HARMLESS_FORMS = re.compile(
    r"dropout|pdrop|_token_|token_id|_eps$|epsilon|initializer|init_|bias|norm|_act$|activation|"
    r"rope|rotary|vision|audio|video|image|mtp|nextn|draft|expert|moe|router|aux_loss|loss|multiplier|scal|"
    r"_layerdrop|soft_?cap|implementation|name_or_path|_gate$|beam|label|temperature|"
    r"adapter|tie_word|tie_enc|lm_head",
    re.IGNORECASE,
)
"""Parts of names that tell of something else: training, positions, experts, other parts."""

_SCHEMES: dict[tuple[object, object], str] = {
    (8, "float"): "fp8",
    (8, "int"): "int8",
    (4, "float"): "nvfp4",
}
"""Bits and type of `kv_cache_scheme` to the type of the KV state."""

_ALGORITHMS = {"fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8"}
"""`kv_cache_quant_algo` to the type of the KV state."""


def refuse_unread(fields: Fields) -> None:
    """Raise ConfigError for the first field that shapes the KV state and has not been read."""
    known = fields.asked | _HARMLESS | fields.type.harmless | {*QUANTIZATION}
    if any(fields.given(name) for name in ("layer_types", "layers_block_type")):
        known |= _LISTED
    if is_mamba(fields):
        known |= _MAMBA
    if fields.given("kv_lora_rank"):
        known |= {"use_mla", "qk_head_dim"}
    if not fields.value("use_cla"):  # layers share only if this is on
        known.add("cla_share_factor")
    overrides: dict[str, object] = {}
    per_layer = fields.sections.get("per_layer_config")
    for entry in per_layer.data.values() if per_layer else ():
        overrides.update(entry)
    for where, data in (
        (fields.name, fields.data),
        (f"{fields.name}: per_layer_config", overrides),
    ):
        _refuse(where, data, known, fields.type_name)
    for name, section in fields.sections.items():
        if name not in (*QUANTIZATION, "per_layer_config"):
            _refuse(section.name, section.data, section.asked | known, fields.type_name)


def unread(fields: Fields) -> list[str]:
    """Return the fields that shape the KV state and have not been read, without standard ones."""
    known = fields.asked | _HARMLESS | {*ALIASES, *QUANTIZATION}
    return [
        name for name, value in fields.data.items() if name not in known and _shapes(name, value)
    ]


def kv_dtype(fields: Fields) -> str:
    """Return the type of KV state that the config's quantisation asks for; bf16 without one.

    Raises ConfigError if it asks for another type than those of DTYPE_BYTES.
    """
    outer = quantization(fields)
    inner: Section = outer.section("quantization") or outer
    for section in (inner, outer):
        if section.value("kv_cache_scheme", "kv_cache_quant_algo") is not None:
            return _scheme_dtype(section)
        for name, value in section.data.items():
            if value and name.startswith("kv_"):
                raise section.wrong(name, "not known; use --dtype", "remove it from the config")
    return "bf16"


def _scheme_dtype(section: Section) -> str:
    name = section.written("kv_cache_scheme", "kv_cache_quant_algo")
    asked = section.value(name)
    if isinstance(asked, dict):
        found = _SCHEMES.get((asked.get("num_bits"), asked.get("type")))
    else:
        found = _ALGORITHMS.get(str(asked).lower())
    if found is None:
        raise section.wrong(name, "not a known type of the KV state", "use --dtype, without it")
    return found


def _refuse(
    where: str, data: Mapping[str, object], known: frozenset[str] | set[str], kind: str
) -> None:
    for name, value in data.items():
        if name not in known and _shapes(name, value):
            raise ConfigError(
                f"{where}: {name}: {value!r:.60}: this field shapes the KV state, and what it "
                f"means for model_type {kind or 'without a name'!r:.40} is not known; remove it if "
                "it does not matter, or name another model"
            )


def _shapes(name: str, value: object) -> bool:
    """Return whether a field says something about the KV state, by its name and kind of value."""
    if not value or _HARMLESS_FORMS.search(name):
        return False
    numbers = isinstance(value, int | list | dict) and not isinstance(value, bool)
    return bool((_SIZES if numbers else _FLAGS).search(name))
