"""Model shapes by the name of a shipped model, or from the config.json of any other.

The shipped configs contain only the fields that the arithmetic reads, with the publishers' values
(data/models/README.md names source and licences).
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Literal

from holdfast.errors import ConfigError
from holdfast.sim.model.fields import Fields
from holdfast.sim.model.layers import layers_of
from holdfast.sim.model.parameters import count, heads, mamba_sizes, weights_bytes
from holdfast.sim.model.shape import Attention, ModelShape
from holdfast.sim.shipped import DATA

CONFIG_BYTES_MAX = 4 * 1024 * 1024
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@cache
def known_models() -> tuple[str, ...]:
    """Return the names of the shipped models, `publisher/model`, in alphabetical order."""
    names = (file.stem.replace("--", "/") for file in (DATA / "models").glob("*--*.json"))
    return tuple(sorted(names, key=str.lower))


def load_model(name: str) -> ModelShape:
    """Return the shape of a shipped model, such as Qwen3-8B, or of the config.json at a path.

    A name may omit the publisher and "Meta-"; case does not matter. Raises ConfigError for an
    unknown name, with similar names, and for a config that lacks a needed field.
    """
    path = Path(name)
    if name.endswith(".json") or path.exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            if path.stat().st_size > CONFIG_BYTES_MAX:
                raise ConfigError(
                    f"{path}: over {CONFIG_BYTES_MAX:,} bytes, no config.json; give another path"
                )
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: cannot be read as JSON: {error}; give a model's config.json"
            ) from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: holds {type(config).__name__}, not a model's config.json")
        return read_model(Fields(config, name))
    wanted = _plain(name)
    plain = {_plain(known): known for known in known_models()}
    holding = [known for short, known in plain.items() if wanted and wanted in short]
    if wanted in plain:
        full = plain[wanted]
    elif len(holding) == 1:
        full = holding[0]
    else:
        close = holding or [plain[s] for s in difflib.get_close_matches(wanted, plain, 5, 0.5)]
        hint = f"; close: {', '.join(close)}" if close else ""
        raise ConfigError(
            f"model {name!r}: not one of the {len(plain)} shipped models{hint}; "
            "`holdfast size --models` lists all, or give the path of its config.json"
        )
    file = DATA / "models" / f"{full.replace('/', '--')}.json"
    return read_model(Fields(json.loads(file.read_text(encoding="utf-8")), full))


def read_model(fields: Fields) -> ModelShape:
    """Return the shape of a model from the fields of its config.json.

    Raises ConfigError that names all missing basic fields, or the first missing field of a layer.
    """
    fields.need(*_REQUIRED)
    if not fields.number("num_attention_heads"):
        raise ConfigError(
            f"{fields.name}: num_attention_heads: 0; a model without any has no KV cache"
        )
    layers = layers_of(fields)
    counted = count(fields, layers)
    # The KV state of each kind of layer; the last `shared` layers reuse that of others.
    shared = fields.number("num_kv_shared_layers", default=0)
    if shared >= len(layers):
        raise ConfigError(
            f"{fields.name}: num_kv_shared_layers: {shared} of {len(layers)} layers; at "
            "least one layer must keep its own KV state; correct the config"
        )
    kinds = [layer.mixer for layer in layers[: len(layers) - shared]]
    parts: list[Attention] = []
    if full := kinds.count("full"):
        latent = fields.value("kv_lora_rank")
        parts.append(_latent(fields, full) if latent else _heads(fields, "full", full))
    if windows := kinds.count("window"):
        parts.append(_heads(fields, "window", windows, "sliding_window"))
    if chunks := kinds.count("chunk"):
        parts.append(_heads(fields, "chunk", chunks, "attention_chunk_size"))
    if kinds.count("compressed"):
        parts += _compressed(fields, len(kinds))
    if linear := kinds.count("linear"):
        nested = fields.section("linear_attn_config")
        if nested is not None:
            size = nested.number("head_dim")
            width = nested.number("num_heads") * size
            kernel = nested.number("short_conv_kernel_size", default=1)
            elements, convolved = width * size, 3 * width
        else:
            keys = fields.number("linear_num_key_heads")
            size = fields.number("linear_key_head_dim")
            values = fields.number("linear_num_value_heads")
            values *= fields.number("linear_value_head_dim")
            kernel = fields.number("linear_conv_kernel_dim", default=1)
            elements, convolved = values * size, 2 * keys * size + values
        parts.append(_state(fields, linear, elements, convolved * max(kernel - 1, 0)))
    if mamba := kinds.count("mamba"):
        kernel = fields.number("conv_kernel", "mamba_d_conv", default=1)
        sizes = mamba_sizes(fields)
        convolved = sizes.inner + 2 * sizes.groups * sizes.state
        elements = sizes.inner * sizes.state
        parts.append(_state(fields, mamba, elements, convolved * max(kernel - 1, 0)))
    shape = ModelShape(
        name=fields.name,
        attention=tuple(parts),
        active_parameters=counted.active,
        parameters=counted.total,
        weights_bytes=weights_bytes(fields, counted),
        context_max=fields.number("max_position_embeddings", default=0),
    )
    if not shape.context_bytes(1) or not counted.active:
        raise ConfigError(
            f"{fields.name}: its layers keep nothing, or compute nothing, because a size is 0; "
            "correct the config"
        )
    return shape


def _heads(
    fields: Fields, kind: Literal["full", "window", "chunk"], layers: int, span_field: str = ""
) -> Attention:
    """Attention with KV heads, over all tokens or over a span that a field gives."""
    query, kv, key_size, value_size = heads(fields, windowed=kind != "full")
    both = key_size + value_size
    span = fields.number(span_field) if span_field else 0
    if span_field and not span:
        raise fields.missing(span_field)
    return Attention(
        kind=kind, layers=layers, elements=kv * both, span=span, pair_flop=2 * query * both
    )


def _latent(fields: Fields, layers: int) -> Attention:
    """One latent for all heads; sparse attention reads it as it is, dense attention expands it."""
    query, rank = fields.number("num_attention_heads"), fields.number("kv_lora_rank")
    rope = fields.number("qk_rope_head_dim")
    top_k = fields.number("index_topk", default=0)
    expanded = fields.number("qk_nope_head_dim") + rope + fields.number("v_head_dim")
    index_size = fields.number("index_head_dim", default=0)
    return Attention(
        kind="full",
        layers=layers,
        elements=rank + rope,
        index_elements=index_size,
        top_k=top_k,
        pair_flop=2 * query * (2 * rank + rope if top_k else expanded),
        index_pair_flop=2 * fields.number("index_n_heads", default=0) * index_size,
    )


def _compressed(fields: Fields, count_: int) -> list[Attention]:
    """DeepSeek-V4: a window in each layer, and one entry per 4 or 128 older tokens.

    Derived from the config alone: an entry has `head_dim` elements for key and value together; the
    layers with the lowest compression have indexer keys too.
    """
    query, size = fields.number("num_attention_heads"), fields.number("head_dim")
    ratios = fields.numbers("compress_ratios")[:count_]
    flop = 4 * query * size
    span = fields.number("sliding_window")
    parts = [Attention(kind="window", layers=count_, elements=size, span=span, pair_flop=flop)]
    lowest = min((ratio for ratio in ratios if ratio), default=0)
    for ratio in sorted({ratio for ratio in ratios if ratio}):
        indexed = ratio == lowest
        index_size = fields.number("index_head_dim") if indexed else 0
        part = Attention(
            kind="full",
            layers=ratios.count(ratio),
            elements=size,
            index_elements=index_size,
            compression=ratio,
            top_k=fields.number("index_topk") if indexed else 0,
            pair_flop=flop,
            index_pair_flop=2 * fields.number("index_n_heads") * index_size,
        )
        parts.append(part)
    return parts


def _state(fields: Fields, layers: int, elements: int, convolution: int) -> Attention:
    named = fields.value("mamba_ssm_dtype", "mamba_ssm_cache_dtype", "dtype", "torch_dtype")
    return Attention(
        kind="state",
        layers=layers,
        elements=elements,
        state_dtype=_DTYPES.get(str(named), "bf16"),
        convolution_elements=convolution,
    )


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-instruct")
