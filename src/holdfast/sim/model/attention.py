"""The KV state of each layer of a model, in elements and bytes, from its config.json.

Where engines store a layer's state in their own layout, the bytes are those of vLLM: index keys of
DeepSeek-V3.2 and its like in fp8 with a scale, their rows in fp8 with scales and unquantised
positions, and the states of Kimi Delta Attention in float32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from holdfast.errors import ConfigError
from holdfast.sim.model.fields import Fields, Section
from holdfast.sim.model.layers import Layer
from holdfast.sim.model.shape import DTYPE_BYTES, Attention

_OF_HEADS = re.compile(r"kv|key_value|group|head|channels|_dim")
"""Parts of names of numbers and sizes of heads."""

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_INDEX_SCALE_ELEMENTS = 128
"""Elements of an index key for one scale of four bytes; the elements are in fp8."""

_LATENT_SCALE_ELEMENTS = 128
"""Elements of a latent for one scale of four bytes, in rows in fp8 of sparse attention."""

_COMPRESSED_SCALE_ELEMENTS = 64
"""Elements of a compressed entry for one scale of a byte, in rows in fp8; a row has one to pad."""

_NVFP4_SCALE_ELEMENTS = 16
"""Elements of a latent for one scale of a byte, in rows in fp4 of sparse attention."""


class Heads(NamedTuple):
    """Numbers of query and KV heads, and the sizes of a key and a value."""

    query: int
    kv: int
    key_size: int
    value_size: int


def states_of(layers: Sequence[Layer], *, shared: int) -> list[Attention]:
    """Return the KV state of layers, equal ones together.

    The last `shared` layers keep none: they use that of others.
    """
    together: dict[Attention, int] = {}
    lowest = min((r for layer in layers if (r := _ratio(layer))), default=0)
    for layer in layers[: len(layers) - shared]:
        for state in _states(layer, lowest):
            together[state] = together.get(state, 0) + 1
    return [replace(state, layers=count) for state, count in together.items()]


def heads(fields: Fields, *, windowed: bool) -> Heads:
    """Return the heads of layers with full or windowed attention.

    Raises ConfigError if a number is missing, or no model can have those that are given.
    """
    query = fields.number("num_attention_heads", least=1)
    kv = _kv_heads(fields, query)
    own = fields.section("attention_other_setting")  # Step-3.5: of the windowed layers
    if own is not None and windowed and own.value("attention_type") == "sliding_attention":
        query = own.number("num_attention_heads", default=query, least=1)
        kv = own.number("num_attention_groups", default=kv, least=1)
        size = value = own.number("head_dim", default=0) or _head_size(fields, query)
    else:
        size = _head_size(fields, query)
        value = fields.number("v_head_dim", default=size) or size  # 0: not of its own
        if windowed:
            query = fields.number("swa_num_attention_heads", default=query, least=1)
            twice = 2 if fields.type_name.startswith("mimo_v2") else 1
            kv = fields.number("swa_num_key_value_heads", default=twice * kv, least=1)
            size = fields.number("swa_head_dim", default=size, least=1)
            value = fields.number("swa_v_head_dim", default=value, least=1)
        elif not fields.given("per_layer_config"):
            wide = fields.number("global_head_dim", default=0)
            size, value = wide or size, wide or value
            few = fields.number("num_global_key_value_heads", default=kv, least=1)
            gated = fields.type_name.startswith("gemma4") and not fields.value("attention_k_eq_v")
            kv = kv if gated else few
    if query % kv:
        name = fields.one_of("num_key_value_heads")
        given = f"{name} {kv}" if name else f"has no num_key_value_heads, whose default is {kv}"
        raise ConfigError(
            f"{fields.name}: {given}: not a divisor of num_attention_heads {query}; correct the "
            "config"
        )
    return Heads(query, kv, size, value)


def _kv_heads(fields: Fields, query: int) -> int:
    """Return the number of KV heads, by the field that the model's type uses."""
    if fields.value("multi_query") and not fields.value("new_decoder_architecture"):
        return 1  # Falcon-7B and GPT-BigCode
    if fields.value("multi_query_attention"):  # ChatGLM
        return fields.number("multi_query_group_num", least=1)
    section = fields.section("attn_config")  # MPT and DBRX
    if section is not None:
        if section.value("attn_type") == "multiquery_attention":
            return 1
        if section.value("attn_type") != "multihead_attention":
            return section.number("kv_n_heads", default=query, least=1)
    fields.one_of("num_key_value_heads")
    kv = fields.number("num_key_value_heads", default=query, least=1)
    if fields.known or not fields.type_name or fields.given("num_key_value_heads"):
        return kv
    raise ConfigError(
        f"{fields.name}: has no num_key_value_heads, and the default of model_type "
        f"{fields.type_name!r:.40} is not known{_unread(fields)}; write num_key_value_heads into "
        f"the config, {query} if each query head has its own"
    )


def _unread(fields: Fields) -> str:
    """Return the text that names the sizes of heads which the config has under unknown names."""
    numbers = {k: v for k, v in fields.data.items() if type(v) is int and k not in fields.asked}
    similar = [f"{name} {n}" for name, n in numbers.items() if _OF_HEADS.search(name)]
    return f" ({', '.join(similar)}: not understood)" if similar else ""


def _head_size(fields: Fields, query: int) -> int:
    fields.one_of("head_dim")
    if fields.value("head_dim") is not None:
        return fields.number("head_dim", least=1)
    if fields.type_name.startswith("zamba"):  # twice as wide as hidden_size
        raise fields.missing("attention_head_dim")
    width = fields.number("hidden_size")
    if width % query or not width:
        raise ConfigError(
            f"{fields.name}: has no head_dim, and hidden_size {width} is not a multiple of "
            f"num_attention_heads {query}{_unread(fields)}; write head_dim into the config"
        )
    return width // query


def _states(layer: Layer, lowest_ratio: int) -> list[Attention]:
    """Return what one layer keeps: nothing, one kind of state, or two."""
    fields, mixer = layer.fields, layer.mixer
    if mixer in ("none", "cross"):
        return []
    if mixer == "window":
        return [_attention(fields, "window", "sliding_window")]
    if mixer == "chunk":
        return [_attention(fields, "chunk", "attention_chunk_size")]
    if mixer == "compressed":
        return _compressed(fields, _ratio(layer), lowest_ratio)
    if mixer in ("linear", "mamba"):
        return [_recurrent(fields)]
    if mixer == "conv":
        kernel = fields.number("conv_L_cache", least=1)
        return [_state(fields, 0, fields.number("conv_dim", "hidden_size") * (kernel - 1))]
    if mixer == "hybrid":
        return [_attention(fields, "full"), _recurrent(fields)]
    if fields.value("kv_lora_rank") is not None:
        return [_latent(fields)]
    return [_indexed(fields) if mixer == "indexed" else _attention(fields, "full")]


def _attention(
    fields: Fields, kind: Literal["full", "window", "chunk"], span_field: str = ""
) -> Attention:
    """Attention with KV heads, over all tokens or over a span that a field gives."""
    query, kv, key_size, value_size = heads(fields, windowed=kind != "full")
    both = key_size + value_size
    span = fields.number(span_field) if span_field else 0
    if span_field and not span:
        raise fields.missing(span_field)
    return Attention(kind=kind, layers=1, elements=kv * both, span=span, pair_flop=2 * query * both)


def _indexed(fields: Fields) -> Attention:
    """Attention with KV heads and an index key a token, as MiniMax-M3 has."""
    section: Section = fields.section("sparse_attention_config") or fields
    size = section.number("sparse_index_dim", "index_head_dim")
    blocks = section.number("sparse_topk_blocks", "index_topk_blocks")
    block = section.number("sparse_block_size", "index_block_size")
    index_heads = section.number("sparse_num_index_heads", "index_n_heads", default=0)
    return replace(
        _attention(fields, "full"),
        index_elements=size,
        index_bytes=size * DTYPE_BYTES["bf16"],
        top_k=blocks * block,
        index_pair_flop=2 * index_heads * size,
    )


def _latent(fields: Fields) -> Attention:
    """One latent for all heads; sparse attention reads it as it is, dense attention expands it."""
    query, rank = fields.number("num_attention_heads", least=1), fields.number("kv_lora_rank")
    plain, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
    top_k = fields.number("index_topk", default=0)
    expanded = plain + rope + fields.number("v_head_dim")
    index_heads = fields.number("index_n_heads", default=0)
    index_size = fields.number("index_head_dim", default=0) if _has_indexer(fields) else 0
    latent = Attention(
        kind="full",
        layers=1,
        elements=rank + rope,
        index_elements=index_size,
        index_bytes=_index_bytes(index_size),
        top_k=top_k,
        pair_flop=2 * query * (2 * rank + rope if top_k else expanded),
        index_pair_flop=2 * index_heads * index_size,
    )
    if not top_k:
        return latent
    return replace(  # rows of sparse attention; the positions are not quantised below fp8
        latent,
        fp8_bytes=rank + 4 * (rank // _LATENT_SCALE_ELEMENTS) + 2 * rope,
        nvfp4_bytes=rank // 2 + rank // _NVFP4_SCALE_ELEMENTS + rope,
    )


def _has_indexer(fields: Fields) -> bool:
    """Return whether this layer has an indexer, or uses the choice of an earlier layer."""
    index = fields.layer_index or 0
    for field, alone in (("indexer_types", "full"), ("index_topk_pattern", "F")):
        listed = fields.listed(field)
        if listed is not None:
            if index >= len(listed):
                raise fields.wrong(field, f"has no entry for layer {index}")
            return bool(listed[index] == alone)
    every = fields.number("index_topk_freq", default=1, least=1)
    first = fields.number("index_skip_topk_offset", default=2)
    return max(index - first + 1, 0) % every == 0


def _index_bytes(size: int) -> float:
    """Return the bytes of an index key in fp8, with its scales."""
    return size + 4 * (size // _INDEX_SCALE_ELEMENTS)


def _ratio(layer: Layer) -> int:
    """Return how many tokens an entry of a compressed layer stands for; 0 in other layers."""
    if layer.mixer != "compressed":
        return 0
    fields, index = layer.fields, layer.fields.layer_index or 0
    field = "compress_ratios" if fields.given("compress_ratios") else "layer_types"
    listed = fields.numbers(field) if field == "compress_ratios" else fields.listed(field) or []
    if index >= len(listed):
        raise fields.wrong(field, f"has no entry for layer {index}")
    if field == "compress_ratios":
        return int(listed[index])
    rates = fields.section("compress_rates")
    kind = str(listed[index])
    if rates is None or kind == "sliding_attention":
        return 0
    return rates.number(kind)


def _compressed(fields: Fields, ratio: int, lowest: int) -> list[Attention]:
    """DeepSeek-V4: a window in each layer, and one entry per 4 or 128 older tokens.

    An entry has `head_dim` elements for key and value together; the layers with the lowest
    compression have index keys too. The group of tokens that is still open is not counted.
    """
    query, size = fields.number("num_attention_heads", least=1), fields.number("head_dim")
    flop, rope = 4 * query * size, fields.number("qk_rope_head_dim")
    plain = max(size - rope, 0)
    row = plain + plain // _COMPRESSED_SCALE_ELEMENTS + 1 + 2 * rope
    span = fields.number("sliding_window")
    window = Attention(
        kind="window", layers=1, elements=size, fp8_bytes=row, span=span, pair_flop=flop
    )
    if not ratio:
        return [window]
    indexed = ratio == lowest
    index_size = fields.number("index_head_dim") if indexed else 0
    older = Attention(
        kind="full",
        layers=1,
        elements=size,
        fp8_bytes=row,
        index_elements=index_size,
        index_bytes=_index_bytes(index_size),
        compression=ratio,
        top_k=fields.number("index_topk") if indexed else 0,
        pair_flop=flop,
        index_pair_flop=2 * fields.number("index_n_heads") * index_size if indexed else 0,
    )
    return [window, older]


def _recurrent(fields: Fields) -> Attention:
    """The state of a recurrent layer, by the sizes that the config has."""
    if is_mamba(fields):
        kernel = fields.number("conv_kernel", "mamba_d_conv", default=1)
        sizes = mamba_sizes(fields)
        convolved = sizes.inner + 2 * sizes.groups * sizes.state
        elements = sizes.inner * sizes.state
        return _state(fields, elements, convolved * max(kernel - 1, 0))
    if (delta := delta_sizes(fields)) is not None:
        return _state(
            fields, delta.elements, delta.convolved * max(delta.kernel - 1, 0), delta.dtype
        )
    if fields.type_name.startswith(("bailing", "minimax")):  # lightning attention
        query = fields.number("num_attention_heads", least=1)
        return _state(fields, query * _head_size(fields, query) ** 2, 0)
    raise fields.missing("linear_num_value_heads or mamba_d_state")


def _state(fields: Fields, elements: int, convolution: int, dtype: str = "") -> Attention:
    named = fields.value("mamba_ssm_dtype", "mamba_ssm_cache_dtype", "dtype", "torch_dtype")
    return Attention(
        kind="state",
        layers=1,
        elements=elements,
        state_dtype=dtype or _DTYPES.get(str(named), "bf16"),
        convolution_elements=convolution,
    )


class DeltaSizes(NamedTuple):
    """Sizes of a layer with the delta rule: heads and head sizes of keys and values."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    kernel: int
    """Width of the convolution of queries, keys and values."""
    dtype: str
    """Type of the state; empty if the config gives it."""

    @property
    def elements(self) -> int:
        """Elements of the state."""
        return self.value_heads * self.value_size * self.key_size

    @property
    def convolved(self) -> int:
        """Elements that the convolution sees of each token."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


def delta_sizes(fields: Fields) -> DeltaSizes | None:
    """Return the sizes, from the fields of Kimi or Qwen3-Next; None if the config has none."""
    section = fields.section("linear_attn_config")
    if section is not None or fields.value("linear_num_heads") is not None:
        source: Section = section or fields
        size = source.number("head_dim" if section else "linear_head_dim")
        number = source.number("num_heads" if section else "linear_num_heads")
        width = "short_conv_kernel_size" if section else "linear_conv_kernel_dim"
        return DeltaSizes(number, size, number, size, source.number(width, default=1), "fp32")
    if fields.value("linear_num_value_heads") is None:
        return None
    return DeltaSizes(
        fields.number("linear_num_key_heads"),
        fields.number("linear_key_head_dim"),
        fields.number("linear_num_value_heads"),
        fields.number("linear_value_head_dim"),
        fields.number("linear_conv_kernel_dim", default=1),
        "",
    )


class MambaSizes(NamedTuple):
    """Sizes of a Mamba layer; `inner` is the width of all heads together."""

    heads: int
    """Number of heads; 0 for Mamba-1, which has neither heads nor groups."""
    inner: int
    groups: int
    state: int


def is_mamba(fields: Fields) -> bool:
    """Return whether the config has the sizes of Mamba layers."""
    return fields.value("mamba_d_state", "ssm_state_size") is not None


def mamba_sizes(fields: Fields) -> MambaSizes:
    """Return the sizes, from the fields of Jamba (Mamba-1), Nemotron, or Bamba and Granite."""
    state = fields.number("ssm_state_size", "mamba_d_state")
    heads_names = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    wide = fields.value("mamba_d_ssm")
    if wide is not None:
        inner = fields.number("mamba_d_ssm")
    elif fields.value("mamba_head_dim", "mamba_d_head") not in (None, "auto"):
        inner = fields.number(*heads_names, least=1) * fields.number(
            "mamba_head_dim", "mamba_d_head"
        )
    else:
        inner = fields.number("mamba_expand") * fields.number("hidden_size")
    if fields.value("n_groups", "mamba_n_groups", "mamba_ngroups") is None:
        if fields.value("mamba_num_heads", "mamba_n_heads") is not None:
            raise fields.missing("n_groups or mamba_n_groups")
        return MambaSizes(0, inner, 0, state)
    groups = fields.number("n_groups", "mamba_n_groups", "mamba_ngroups")
    return MambaSizes(fields.number(*heads_names, least=1), inner, groups, state)
