"""The layers of a model, from its config.json: attention or recurrence, and feed-forward part.

Publishers use different fields for the same thing; this module maps them to one set of names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from holdfast.errors import ConfigError
from holdfast.sim.model.fields import Fields, Section

Mixer = Literal[
    "full", "window", "chunk", "indexed", "compressed", "linear", "mamba", "conv", "hybrid",
    "cross", "none",
]  # fmt: skip
Feed = Literal["dense", "experts", "both", "none"]
_Kind = TypeVar("_Kind")

_LAYER_TYPES: dict[str, Mixer] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "minimax_m3_sparse": "indexed",
    "conv": "conv",
    "hybrid": "hybrid",
}
_BLOCK_TYPES: dict[str, tuple[Mixer, Feed | None]] = {
    **{name: (mixer, None) for name, mixer in _LAYER_TYPES.items()},
    "moe": ("none", "experts"),
    "mlp": ("none", "dense"),
}
"""Kinds of `layers_block_type`; None: the feed-forward part is given by other fields."""

_PATTERN: dict[str, tuple[Mixer, Feed]] = {
    "M": ("mamba", "none"),
    "*": ("full", "none"),
    "E": ("none", "experts"),
    "-": ("none", "dense"),
}
_FEEDS: dict[str, Feed] = {
    "dense": "dense",
    "sparse": "experts",
    "moe": "experts",
    "hash_moe": "experts",
}
_DRAFT_LAYERS = (
    *("num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_hidden_layers"),
)
"""Numbers of draft layers, whose entries some publishers append to the lists of layers."""

_STATE_FIELDS = ("linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "ssm_state_size")
"""Sizes of recurrent layers: a config that has one but lists no recurrent layer is refused."""

_OTHER_HYBRIDS = (
    "_block_types",
    "block_configs",
    "block_types",
    "hybrid_layer_ids",
)
"""Fields that describe mixed layers in an unsupported way; a config that has one is refused."""

_WINDOWS_OFF = ("qwen2", "qwen3", "smollm3")
"""Starts of model types that have a window only if `use_sliding_window` turns it on."""

LAYERS_MAX = 10_000


class Layer(NamedTuple):
    """One layer: its fields, its sequence mixer and its feed-forward part."""

    fields: Fields
    mixer: Mixer
    feed: Feed


def layers_of(fields: Fields) -> list[Layer]:
    """Return the model's layers in order. Raises ConfigError for fields that contradict."""
    count = _count(fields)
    if count > LAYERS_MAX:
        raise fields.wrong(fields.written("num_hidden_layers"), f"over {LAYERS_MAX:,} layers")
    pattern: list[tuple[Mixer, Feed]] | None
    pattern = _listed_kinds(fields, "hybrid_override_pattern", count, _PATTERN)
    if pattern is None and (blocks := _blocks(fields, count)) is not None:
        feeds = _feeds(fields, count) if any(feed is None for _, feed in blocks) else []
        pure = not feeds
        pattern = [
            (mixer, feed or ("none" if pure or mixer == "none" else feeds[i]))
            for i, (mixer, feed) in enumerate(blocks)
        ]
    if pattern is None:
        pattern = list(zip(_mixers(fields, count), _feeds(fields, count), strict=True))
    overrides = _overrides(fields, count)
    filled = fields.type.cycle or fields.type_name.startswith(_WINDOWS_OFF)  # by the class
    layers = []
    for i, (mixer, feed) in enumerate(pattern):
        own = overrides.get(i, {})
        if "sliding_window" in own and not filled and not fields.given("layer_types"):
            mixer = "window" if own["sliding_window"] else "full"  # noqa: PLW2901  # the layer's own
        layers.append(Layer(fields.layer(i, own), mixer, feed))
    return layers


def _count(fields: Fields) -> int:
    """Return the number of layers; resaved hybrids give their list alone."""
    fields.one_of("num_hidden_layers")
    blocks = fields.listed("layers_block_type")
    if blocks is not None and not fields.given("num_hidden_layers"):
        return len(blocks)
    return fields.number("num_hidden_layers", least=1)


def _overrides(fields: Fields, count: int) -> dict[int, Mapping[str, Any]]:
    """Return the fields that `per_layer_config` of transformers replaces, by layer."""
    section = fields.section("per_layer_config")
    found: dict[int, Mapping[str, Any]] = {}
    for key, entry in section.data.items() if section else ():
        if not key.isdecimal() or int(key) >= count or not isinstance(entry, dict):
            raise fields.wrong(
                "per_layer_config", f"{key!r:.20} is not one of {count} layers with its fields"
            )
        if entry.get("skip"):
            raise fields.wrong("per_layer_config", "skips parts of layers, which is not known")
        found[int(key)] = entry
    return found


def _blocks(fields: Fields, count: int) -> list[tuple[Mixer, Feed | None]] | None:
    """Return mixers and feed-forward parts of `layers_block_type`; None without the field.

    Nemotron-H has layers of one part only, either a mixer or a feed-forward part.
    """
    found = _listed_kinds(fields, "layers_block_type", count, _BLOCK_TYPES)
    alone = found is not None and any(feed for _, feed in found)
    return [(m, f or ("none" if alone else None)) for m, f in found] if found else found


def _mixers(fields: Fields, count: int) -> Sequence[Mixer]:
    if fields.value("compress_ratios", "compress_rates") is not None:
        return ["compressed" for _ in range(count)]
    if fields.type_name.startswith("deepseek_v4"):
        raise fields.missing("compress_ratios")
    listed = _listed_kinds(fields, "layer_types", count, _LAYER_TYPES)
    mixers: list[Mixer] = [*(listed or _described(fields, count) or _windowed(fields, count))]
    for i in fields.numbers("cross_attention_layers"):
        if i >= count:
            raise _not_understood(fields, "cross_attention_layers", f"there are {count} layers")
        mixers[i] = "cross"
    for i in _sparse(fields, count):
        mixers[i] = "indexed"
    return mixers


def _sparse(fields: Fields, count: int) -> set[int]:
    """Return the layers to which `sparse_attention_config` of MiniMax-M3 gives index keys."""
    section = fields.section("sparse_attention_config")
    if section is None or not section.value("use_sparse_attention"):
        return set()
    listed = section.listed("sparse_attention_freq")
    if listed is None:
        raise section.missing("sparse_attention_freq")
    _check_length(fields, "sparse_attention_freq", listed, count)
    return {i for i, sparse in enumerate(listed) if sparse}


def _described(fields: Fields, count: int) -> Sequence[Mixer] | None:
    """Return the mixers by a field that describes all layers; None if there is none."""
    linear = fields.section("linear_attn_config")
    if linear is not None:
        full = set(linear.numbers("full_attn_layers"))
        linear.value("kda_layers")  # all others
        return ["full" if i in full else "linear" for i in range(1, count + 1)]
    windows = _listed(fields, "hybrid_layer_pattern", count)
    if windows is not None:
        return ["window" if windowed else "full" for windowed in windows]
    if fields.value("full_attn_idxs") is not None:  # LFM2
        _check_type(fields, "full_attn_idxs", "lfm2")
        full = set(fields.numbers("full_attn_idxs"))
        return ["full" if i in full else "conv" for i in range(count)]
    if fields.type_name.startswith("llama4") and fields.value("attention_chunk_size"):
        period = _period(fields, "no_rope_layer_interval", 4)  # a layer without rope is full
        every = [i % period for i in range(1, count + 1)]
        ropes = fields.listed("no_rope_layers") or every  # 0: without rope
        _check_length(fields, "no_rope_layers", ropes, count)
        return ["chunk" if rope else "full" for rope in ropes]
    lightning = _listed(fields, "attn_type_list", count)
    if lightning is not None and fields.type_name.startswith("minimax"):
        return ["full" if full else "linear" for full in lightning]
    return _recurrent(fields, count)


def _recurrent(fields: Fields, count: int) -> Sequence[Mixer] | None:
    """Return the mixers of a model with recurrent layers; None if no field names such layers."""
    if fields.value("full_attention_interval") is not None:  # Qwen3-Next
        return _every(fields, "full_attention_interval", count, "linear")
    if fields.value("layer_group_size") is not None:  # Ring and Ling
        if not fields.type_name.startswith("bailing"):
            raise _not_understood(
                fields, "layer_group_size", f"not known for model_type {fields.type_name!r:.40}"
            )
        return _every(fields, "layer_group_size", count, "linear")
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
    kind = fields.type_name or known
    if kind != known:
        raise _not_understood(fields, field, f"not known for model_type {kind!r:.40}")


def _windowed(fields: Fields, count: int) -> Sequence[Mixer]:
    """Return the mixers by the model type, or by `sliding_window` for all or some layers."""
    # Refuse a config if a field that this module cannot interpret says that layers differ.
    if fields.type.irregular:
        raise fields.missing("layer_types")
    cycle: list[Mixer] = [_LAYER_TYPES.get(kind, "none") for kind in fields.type.cycle]
    for field in (*_OTHER_HYBRIDS, *_STATE_FIELDS):
        if fields.given(field) and not {"linear", "hybrid"} & {*cycle}:
            raise _not_understood(fields, field, "says that layers differ, but not how")
    kinds = fields.listed("attn_type_list")
    if kinds is not None and any(kind != 1 for kind in kinds):  # 1: full, as in MiniMax-M2
        raise _not_understood(fields, "attn_type_list", "names layers without full attention")
    if cycle and not {"window", "full"} >= {*cycle}:
        return (cycle * count)[:count]
    used = fields.value("use_sliding_window")
    if used is None and fields.type_name.startswith(_WINDOWS_OFF):
        used = False  # the default of these types
    span = fields.number("sliding_window", default=0)
    longest = fields.number("max_position_embeddings", default=0)
    if not span or used is False or 0 < longest <= span:  # no context exceeds the window
        for field in ("sliding_window_pattern", "_sliding_window_pattern", "max_window_layers"):
            fields.value(field)  # describe windows, of which there are none
        return ["full" for _ in range(count)]
    for field in (
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "global_attn_every_n_layers",
    ):
        if fields.given(field):
            return _every(fields, field, count, "window")
    if cycle:
        last: list[Mixer] = [_LAYER_TYPES[fields.type.last]] if fields.type.last else []
        return [*(cycle * count)[: count - len(last)], *last]
    first = fields.number("max_window_layers", default=0) if used else 0
    return ["window" if i >= first else "full" for i in range(count)]


def _every(fields: Fields, field: str, count: int, others: Mixer) -> Sequence[Mixer]:
    """Return mixers of which each nth is full; the field is n, or the letters of one period."""
    letters = fields.value(field)
    if isinstance(letters, str) and {*letters} == {"L", "G"} and fields.type.cycle:  # EXAONE 4
        return [others if letters[i % len(letters)] == "L" else "full" for i in range(count)]
    period = _period(fields, field)
    return [others if i % period else "full" for i in range(1, count + 1)]


def _period(fields: Fields, field: str, default: int | None = None) -> int:
    value = fields.value(field)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 1 <= value <= LAYERS_MAX:
        raise _not_understood(fields, field, f"not a whole number from 1 to {LAYERS_MAX:,}")
    return value


def _not_understood(fields: Fields, field: str, why: str) -> ConfigError:
    remedy = f"write layer_types into the config, one of {', '.join(_LAYER_TYPES)} for each layer"
    return fields.wrong(field, why, remedy)


def _feeds(fields: Fields, count: int) -> Sequence[Feed]:
    if not experts_of(fields):
        return ["dense" for _ in range(count)]
    if fields.value("enable_moe_block"):
        return ["both" for _ in range(count)]
    listed = _listed_kinds(fields, "mlp_layer_types", count, _FEEDS)
    if listed is not None:
        return listed
    if fields.value("expert_layer_period") is not None:  # Jamba
        period, place = _period(fields, "expert_layer_period"), fields.number("expert_layer_offset")
        return ["experts" if i % period == place else "dense" for i in range(count)]
    sparse = _sparse_layers(fields)
    if sparse is not None:
        return ["experts" if i in sparse else "dense" for i in range(count)]
    names = ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step")
    if isinstance(fields.value(*names), list):
        entries = _listed(fields, fields.written(*names), count) or []
        return ["experts" if sparse else "dense" for sparse in entries]
    every = fields.number(*names, default=1) or 1
    dense = set(fields.numbers("mlp_only_layers"))
    first = fields.number("first_k_dense_replace", "num_dense_layers", default=0)
    offset = 0 if fields.value("first_k_dense_replace") is not None else 1
    return [
        "dense" if i < first or i in dense or (i + offset) % every else "experts"
        for i in range(count)
    ]


def _sparse_layers(fields: Fields) -> set[int] | None:
    """Return the layers with experts if the config numbers them, as Llama 4 and Step do."""
    value = fields.value("moe_layers", "moe_layers_enum")
    if isinstance(value, str):
        value = [int(each) if each.isdecimal() else each for each in value.split(",")]
    if value is None:
        return None
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise fields.wrong(fields.written("moe_layers", "moe_layers_enum"), "not a list of layers")
    return {int(each) for each in value}


def experts_of(fields: Fields) -> int:
    """Return the number of routed experts of a sparse layer; 0 for a dense model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    source: Section = fields.section("ffn_config") or fields  # DBRX
    value = source.value(*names)
    if isinstance(value, list) and value and len(set(map(str, value))) == 1:  # one per modality
        return Section({"num_experts": value[0]}, fields.name).number("num_experts")
    return source.number(*names, default=0)


def _check_length(fields: Fields, field: str, listed: Sequence[object], count: int) -> None:
    if len(listed) != count:
        raise ConfigError(
            f"{fields.name}: {field}: {len(listed)} entries for num_hidden_layers {count}; "
            "correct the config"
        )


def _listed(fields: Fields, field: str, count: int) -> Sequence[Any] | None:
    """Return the field's entries, one for each of `count` layers; None if it does not exist.

    Entries for draft layers, which some publishers append, are left out.
    """
    listed = fields.listed(field)
    if listed is not None:
        drafts = [fields.value(name) for name in _DRAFT_LAYERS]
        if len(listed) - count in [each for each in drafts if each]:
            listed = listed[:count]
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
