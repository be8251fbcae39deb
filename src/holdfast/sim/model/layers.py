"""The layers of a model, from its config.json: attention or recurrence, and feed-forward part.

Publishers use different fields for the same thing; this module maps them to one set of names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from holdfast.errors import ConfigError
from holdfast.sim.model.fields import Fields

Mixer = Literal["full", "window", "chunk", "linear", "mamba", "compressed", "none"]
Feed = Literal["dense", "experts", "both", "none"]
_Kind = TypeVar("_Kind")

_LAYER_TYPES: dict[str, Mixer] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "mamba": "mamba",
}
_PATTERN: dict[str, tuple[Mixer, Feed]] = {
    "M": ("mamba", "none"),
    "*": ("full", "none"),
    "E": ("none", "experts"),
    "-": ("none", "dense"),
}
_LLAMA4_FULL_EVERY = 4
"""Llama 4's default without a list of layers: each fourth has no rope and full attention."""

_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Model type to n: each nth layer has full attention if a config has a window but no pattern."""

_STATE_FIELDS = ("linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "ssm_state_size")
"""Sizes of recurrent layers: a config that has one but lists no recurrent layer is refused."""

_OTHER_HYBRIDS = (
    "_block_types",
    "block_configs",
    "block_types",
    "full_attn_idxs",
    "global_attn_every_n_layers",
    "hybrid_layer_ids",
)
"""Fields that describe mixed layers in an unsupported way; a config that has one is refused."""

LAYERS_MAX = 10_000


class Layer(NamedTuple):
    """One layer: its sequence mixer and its feed-forward part."""

    mixer: Mixer
    feed: Feed


def layers_of(fields: Fields) -> list[Layer]:
    """Return the model's layers in order. Raises ConfigError for fields that contradict."""
    count = fields.number("num_hidden_layers", least=1)
    if count > LAYERS_MAX:
        raise ConfigError(
            f"{fields.name}: num_hidden_layers: {count:,}: over {LAYERS_MAX:,}; correct the config"
        )
    pattern = _listed_kinds(fields, "hybrid_override_pattern", count, _PATTERN)
    if pattern is None:
        pattern = list(zip(_mixers(fields, count), _feeds(fields, count), strict=True))
    return [Layer(*both) for both in pattern]


def _mixers(fields: Fields, count: int) -> Sequence[Mixer]:
    types = _listed_kinds(fields, "layer_types", count, _LAYER_TYPES)
    if types is not None:
        return types
    linear = fields.section("linear_attn_config")
    if linear is not None:
        full = set(linear.numbers("full_attn_layers"))
        return ["full" if i in full else "linear" for i in range(1, count + 1)]
    windows = _listed(fields, "hybrid_layer_pattern", count)
    if windows is not None:
        return ["window" if windowed else "full" for windowed in windows]
    if fields.value("compress_ratios") is not None:
        return ["compressed"] * count
    if str(fields.value("model_type")).startswith("llama4") and fields.value(
        "attention_chunk_size"
    ):
        every = [i % _LLAMA4_FULL_EVERY for i in range(1, count + 1)]
        ropes = fields.listed("no_rope_layers") or every  # 0: without rope, so full attention
        _check_length(fields, "no_rope_layers", ropes, count)
        return ["chunk" if rope else "full" for rope in ropes]
    return _recurrent(fields, count) or _windowed(fields, count)


def _recurrent(fields: Fields, count: int) -> Sequence[Mixer] | None:
    """Return the mixers of a model with recurrent layers; None if no field names such layers."""
    blocks = _listed_kinds(fields, "layers_block_type", count, _LAYER_TYPES)
    if blocks is not None:
        return blocks
    if fields.value("full_attention_interval") is not None:  # Qwen3-Next
        return _every(fields, "full_attention_interval", count, "linear")
    if fields.value("attn_layer_indices") is not None:
        _check_type(fields, "attn_layer_indices", "bamba")
        full = set(fields.numbers("attn_layer_indices"))
        if max(full, default=0) >= count:
            raise _not_understood(fields, "attn_layer_indices", f"there are {count} layers")
        return ["full" if i in full else "mamba" for i in range(count)]
    if fields.value("attn_layer_period") is None:
        return None
    _check_type(fields, "attn_layer_period", "jamba")
    period = _period(fields, "attn_layer_period")
    offset = fields.number("attn_layer_offset")
    return ["full" if i % period == offset else "mamba" for i in range(count)]


def _check_type(fields: Fields, field: str, known: str) -> None:
    """Raise ConfigError unless the model is of the type `known`, which defines the field."""
    kind = fields.value("model_type") or known
    if kind != known:
        raise _not_understood(fields, field, f"not known for model_type {kind!r:.40}")


def _windowed(fields: Fields, count: int) -> Sequence[Mixer]:
    """Return the mixers by `sliding_window`: for all layers, or those that a pattern selects."""
    # Refuse a config if a field that this module cannot interpret says that layers differ.
    for field in (*_OTHER_HYBRIDS, *_STATE_FIELDS):
        if fields.value(field) is not None:
            raise _not_understood(fields, field, "says that layers differ, but not how")
    kinds = fields.listed("attn_type_list")
    if kinds is not None and any(kind != 1 for kind in kinds):  # 1: full, as in MiniMax-M2
        raise _not_understood(fields, "attn_type_list", "names layers without full attention")
    used = fields.value("use_sliding_window")
    if used is None and str(fields.value("model_type")).startswith(("qwen2", "qwen3")):
        used = False  # the default of these types
    span = fields.number("sliding_window", default=0)
    longest = fields.number("max_position_embeddings", default=0)
    if not span or used is False or 0 < longest <= span:  # no context exceeds the window
        return ["full"] * count
    for field in ("sliding_window_pattern", "_sliding_window_pattern"):
        if fields.value(field) is not None:
            return _every(fields, field, count, "window")
    full_every = _FULL_EVERY.get(str(fields.value("model_type")))
    if full_every:
        return ["window" if i % full_every else "full" for i in range(1, count + 1)]
    first = fields.number("max_window_layers", default=0) if used else 0
    return ["window" if i >= first else "full" for i in range(count)]


def _every(fields: Fields, field: str, count: int, others: Mixer) -> Sequence[Mixer]:
    """Return mixers of which each nth is full; the field is n."""
    period = _period(fields, field)
    return [others if i % period else "full" for i in range(1, count + 1)]


def _period(fields: Fields, field: str) -> int:
    value = fields.value(field)
    if type(value) is not int or not 1 <= value <= LAYERS_MAX:
        raise _not_understood(fields, field, f"not a whole number from 1 to {LAYERS_MAX:,}")
    return value


def _not_understood(fields: Fields, field: str, why: str) -> ConfigError:
    return ConfigError(
        f"{fields.name}: {field}: {fields.value(field)!r:.40}: {why}; write layer_types into the "
        f"config, one of {', '.join(_LAYER_TYPES)} for each layer"
    )


def _feeds(fields: Fields, count: int) -> Sequence[Feed]:
    if not experts_of(fields):
        return ["dense"] * count
    if fields.value("enable_moe_block"):
        return ["both"] * count
    if fields.value("expert_layer_period") is not None:  # Jamba
        period, place = _period(fields, "expert_layer_period"), fields.number("expert_layer_offset")
        return ["experts" if i % period == place else "dense" for i in range(count)]
    names = ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step")
    if isinstance(listed := fields.value(*names), list):
        _check_length(fields, "moe_layer_freq", listed, count)
        return ["experts" if sparse else "dense" for sparse in listed]
    every = fields.number(*names, default=1) or 1
    dense = set(fields.numbers("mlp_only_layers"))
    first = fields.number("first_k_dense_replace", default=0)
    offset = 0 if fields.value("first_k_dense_replace") is not None else 1
    return [
        "dense" if i < first or i in dense or (i + offset) % every else "experts"
        for i in range(count)
    ]


def experts_of(fields: Fields) -> int:
    """Return the number of routed experts of a sparse layer; 0 for a dense model."""
    return fields.number("n_routed_experts", "num_experts", "num_local_experts", default=0)


def _check_length(fields: Fields, field: str, listed: Sequence[object], count: int) -> None:
    if len(listed) != count:
        raise ConfigError(
            f"{fields.name}: {field}: {len(listed)} entries for num_hidden_layers {count}; "
            "correct the config"
        )


def _listed(fields: Fields, field: str, count: int) -> Sequence[Any] | None:
    """Return the field's entries, one for each of `count` layers; None if it does not exist."""
    listed = fields.listed(field)
    if listed is not None:
        _check_length(fields, field, listed, count)
    return listed


def _listed_kinds(
    fields: Fields, field: str, count: int, known: Mapping[str, _Kind]
) -> list[_Kind] | None:
    """Return the kinds that a field names, one for each layer; None if it does not exist."""
    listed = _listed(fields, field, count)
    if listed is None:
        return None
    strange = sorted({str(entry) for entry in listed} - set(known))
    if strange:
        raise ConfigError(
            f"{fields.name}: {field}: {strange[0]!r} is no kind of layer that is known; "
            f"known: {', '.join(known)}"
        )
    return [known[name] for name in listed]
