"""Which layer of a model does what: how it remembers, and what its feed-forward part is.

Publishers say it in different fields; here they become one name a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from holdfast.errors import ConfigError
from holdfast.sim.model.fields import Fields

Mixer = Literal["full", "window", "chunk", "linear", "mamba", "compressed", "none"]
Feed = Literal["dense", "experts", "both", "none"]

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
"""Llama 4's default where its config lists no layers: each fourth has no rope and sees all."""


LAYERS_MAX = 10_000


class Layer(NamedTuple):
    """What one layer is made of."""

    mixer: Mixer
    feed: Feed


def layers_of(fields: Fields) -> list[Layer]:
    """Return the model's layers in order. Raises ConfigError where lists do not fit."""
    count = fields.number("num_hidden_layers")
    if count > LAYERS_MAX:
        raise ConfigError(
            f"{fields.name}: num_hidden_layers: {count:,}: over {LAYERS_MAX:,}; correct the config"
        )
    pattern = fields.listed("hybrid_override_pattern")
    if pattern is not None:
        _check_length(fields, "hybrid_override_pattern", pattern, count)
        _check_known(fields, "hybrid_override_pattern", pattern, _PATTERN)
        return [Layer(*_PATTERN[sign]) for sign in pattern]
    return [
        Layer(*both) for both in zip(_mixers(fields, count), _feeds(fields, count), strict=True)
    ]


def _mixers(fields: Fields, count: int) -> Sequence[Mixer]:
    types = fields.listed("layer_types")
    if types is not None:
        _check_length(fields, "layer_types", types, count)
        _check_known(fields, "layer_types", types, _LAYER_TYPES)
        return [_LAYER_TYPES[name] for name in types]
    linear = fields.section("linear_attn_config")
    if linear is not None:
        full = set(linear.numbers("full_attn_layers"))
        return ["full" if i in full else "linear" for i in range(1, count + 1)]
    windows = fields.listed("hybrid_layer_pattern")
    if windows is not None:
        _check_length(fields, "hybrid_layer_pattern", windows, count)
        return ["window" if windowed else "full" for windowed in windows]
    if fields.value("compress_ratios") is not None:
        return ["compressed"] * count
    if str(fields.value("model_type")).startswith("llama4") and fields.value(
        "attention_chunk_size"
    ):
        return _llama4(fields, count)
    return _windowed_from(fields, count)


def _llama4(fields: Fields, count: int) -> Sequence[Mixer]:
    listed = fields.listed("no_rope_layers")  # 1: with rope, in chunks; 0: without, sees all
    if listed:
        _check_length(fields, "no_rope_layers", listed, count)
        return ["chunk" if rope else "full" for rope in listed]
    return ["chunk" if i % _LLAMA4_FULL_EVERY else "full" for i in range(1, count + 1)]


def _windowed_from(fields: Fields, count: int) -> Sequence[Mixer]:
    """Return what `sliding_window` says: all layers, or those from `max_window_layers` on."""
    used = fields.value("use_sliding_window")
    if not fields.value("sliding_window") or used is False:
        return ["full"] * count
    first = fields.number("max_window_layers", default=0) if used else 0
    return ["window" if i >= first else "full" for i in range(count)]


def _feeds(fields: Fields, count: int) -> Sequence[Feed]:
    if not experts_of(fields):
        return ["dense"] * count
    if fields.value("enable_moe_block"):
        return ["both"] * count
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
    """Return how many routed experts a sparse layer has; 0 for a dense model."""
    return fields.number("n_routed_experts", "num_experts", "num_local_experts", default=0)


def _check_length(fields: Fields, field: str, listed: Sequence[object], count: int) -> None:
    if len(listed) != count:
        raise ConfigError(
            f"{fields.name}: {field}: {len(listed)} entries for num_hidden_layers {count}; "
            "correct the config"
        )


def _check_known(fields: Fields, field: str, listed: Sequence[str], known: Iterable[str]) -> None:
    strange = sorted({str(entry) for entry in listed} - set(known))
    if strange:
        raise ConfigError(
            f"{fields.name}: {field}: {strange[0]!r} is no kind of layer that is known here; "
            f"known: {', '.join(known)}"
        )
