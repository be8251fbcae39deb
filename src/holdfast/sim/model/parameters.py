"""Estimates of a model's parameters: in total, active per token, and their bytes.

Only matrices count. Norms, biases, sinks, draft heads and vision towers are left out: less than one
per cent of each shipped model. Embedding and output matrices count, as in published figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.sim.model.attention import delta_sizes, heads, is_mamba, mamba_sizes
from holdfast.sim.model.fields import Fields, Section, quantization
from holdfast.sim.model.layers import Layer, experts_of

BITS_PER_BYTE = 8
_EXPERT_BITS_MX = 4.25
"""Four bits per weight and an eight-bit scale per 32 weights (OCP Microscaling, 2023)."""

_FOUR_TIMES = (
    *("falcon", "RefinedWeb", "bloom", "mpt", "codegen", "openai-gpt"),
    *("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "gptj"),
)
"""Starts of model types whose feed-forward part is four times as wide as `hidden_size`."""

_UNGATED = (*_FOUR_TIMES, "opt", "starcoder2", "persimmon", "xglm")
"""Starts of model types whose feed-forward part has no gate; phi is one of them too."""


class ParameterCount(NamedTuple):
    """Parameters active per token, in total, and in routed experts."""

    active: float = 0.0
    total: float = 0.0
    routed: float = 0.0

    def plus(self, other: ParameterCount) -> ParameterCount:
        """Return the sum."""
        return ParameterCount(*(a + b for a, b in zip(self, other, strict=True)))


def count(fields: Fields, layers: Sequence[Layer]) -> ParameterCount:
    """Return the parameters of a whole model."""
    hidden = fields.number("hidden_size")
    tied = bool(fields.value("tie_word_embeddings"))
    ends = fields.number("vocab_size") * hidden * (1 if tied else 2)
    counted = ParameterCount(ends, ends)
    for layer in layers:
        weights = _mixer(layer, hidden)
        counted = counted.plus(ParameterCount(weights, weights)).plus(_feed(layer, hidden))
    return counted


def weights_bytes(fields: Fields, counted: ParameterCount) -> float:
    """Return the bytes of all weights in their published precision."""
    dtype = str(fields.value("torch_dtype", "dtype"))
    plain = 32.0 if dtype == "float32" else 16.0
    routed_bits = other_bits = plain  # bits per weight of routed experts, and of all others
    quantized = quantization(fields)
    method = str(quantized.value("quant_method"))
    if "fp8" in method:
        other_bits = 8.0
        routed_bits = _EXPERT_BITS_MX if fields.value("expert_dtype") == "fp4" else other_bits
    elif method == "mxfp4":
        routed_bits = _EXPERT_BITS_MX
    elif method == "compressed-tensors":
        groups = quantized.section("config_groups")
        group = groups and groups.section("group_0")
        weights = group and group.section("weights")
        if weights:
            scale_bits = 8.0 if "mxfp4" in str(quantized.value("format")) else plain
            size = weights.number("group_size", default=128) or 128
            routed_bits = weights.number("num_bits", default=16) + scale_bits / size
    elif method in ("gptq", "awq"):
        size = quantized.number("group_size", default=128) or 128
        routed_bits = other_bits = quantized.number("bits", default=16) + plain / size
    other = counted.total - counted.routed
    return (counted.routed * routed_bits + other * other_bits) / BITS_PER_BYTE


def _mixer(layer: Layer, hidden: int) -> float:
    fields, mixer = layer.fields, layer.mixer
    if mixer == "none":
        return 0.0
    if mixer in ("linear", "mamba"):
        return _recurrent(fields, hidden)
    if mixer == "conv":  # gates in and out, and an output
        return 4 * hidden * hidden
    if mixer == "hybrid":
        return _recurrent(fields, hidden) + _heads(fields, hidden, windowed=False)
    if mixer == "compressed":  # DeepSeek-V4: one latent head, low-rank queries and outputs
        query, size = fields.number("num_attention_heads"), fields.number("head_dim")
        narrow, out = fields.number("q_lora_rank"), fields.number("o_lora_rank")
        weights = (hidden + query * size) * narrow + hidden * size
        weights += query * size * out + fields.number("o_groups") * out * hidden
        return weights + 2 * hidden * size  # entries and gates of the compressor
    if fields.value("kv_lora_rank") is not None:  # latent attention
        query = fields.number("num_attention_heads")
        nope, rope = fields.number("qk_nope_head_dim"), fields.number("qk_rope_head_dim")
        value, rank = fields.number("v_head_dim"), fields.number("kv_lora_rank")
        narrow = fields.number("q_lora_rank", default=0)
        queries = query * (nope + rope)
        weights = (hidden + queries) * narrow if narrow else hidden * queries
        weights += hidden * (rank + rope) + rank * query * (nope + value) + query * value * hidden
        gate = hidden * query * value if fields.value("mla_use_output_gate") else 0
        index_heads = fields.number("index_n_heads", default=0)  # the indexer of DeepSeek-V3.2
        index_size = fields.number("index_head_dim", default=0)
        index_outputs = index_size + index_heads
        indexer = (narrow or hidden) * index_heads * index_size + hidden * index_outputs
        return weights + gate + indexer
    return _heads(fields, hidden, windowed=mixer == "window")


def _heads(fields: Fields, hidden: int, *, windowed: bool) -> float:
    query, kv, key_size, value_size = heads(fields, windowed=windowed)
    gate = 2 if fields.value("attn_output_gate") else 1
    projections = gate * query * key_size + kv * (key_size + value_size) + query * value_size
    return hidden * projections


def _recurrent(fields: Fields, hidden: int) -> float:
    if not is_mamba(fields):
        delta = delta_sizes(fields)
        if delta is None:  # lightning attention: queries, keys, values, gate and output
            return 5 * _heads(fields, hidden, windowed=False) / 4
        if delta.dtype:  # Kimi: gates of low rank
            width, size = delta.value_heads * delta.value_size, delta.value_size
            return 5 * hidden * width + size * (hidden + width) + hidden * delta.value_heads
        keys, values = delta.key_heads * delta.key_size, delta.value_heads * delta.value_size
        return hidden * (2 * keys + 3 * values + 2 * delta.value_heads)
    sizes = mamba_sizes(fields)
    if not sizes.heads:
        auto = fields.value("mamba_dt_rank") in (None, "auto")
        dt_rank = -(-hidden // 16) if auto else fields.number("mamba_dt_rank")
        return 3 * hidden * sizes.inner + sizes.inner * (2 * dt_rank + 3 * sizes.state)
    into = 2 * sizes.inner + 2 * sizes.groups * sizes.state + sizes.heads
    return hidden * into + sizes.inner * hidden


def _feed(layer: Layer, hidden: int) -> ParameterCount:
    fields, feed = layer.fields, layer.feed
    if feed == "none":
        return ParameterCount()
    if feed == "dense":
        weights = _matrices(fields) * hidden * _width(fields, hidden)
        return ParameterCount(weights, weights)
    number = experts_of(fields)
    source: Section = fields.section("ffn_config") or fields  # DBRX
    chosen = source.number(
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_top_k",
        "moe_topk",
        "moe_k",
    )
    inner = _expert_width(fields, source)
    narrow = fields.number("routed_expert_hidden_size", "moe_latent_size", default=0)
    each = _matrices(fields) * (narrow or hidden) * inner
    router = hidden * number + 2 * hidden * narrow
    shared = fields.number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        default=0,
    )
    if not shared:  # inner width of the experts that every token uses
        default = 1 if fields.type_name.startswith("llama4") else 0
        names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        shared = fields.number(*names, default=default) * inner
    always = router + _matrices(fields) * hidden * shared
    sparse = ParameterCount(chosen * each + always, number * each + always, number * each)
    return sparse.plus(_feed(layer._replace(feed="dense"), hidden)) if feed == "both" else sparse


def _expert_width(fields: Fields, source: Section) -> int:
    """Return the inner width of an expert: the first one if modalities have their own."""
    names = ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
    value = source.value(*names)
    if isinstance(value, list) and len(value) < (fields.layer_index or 0) + 1:
        return Section({names[0]: value[0] if value else None}, fields.name).number(names[0])
    return source.number(*names)


def _width(fields: Fields, hidden: int) -> int:
    """Return the inner width of a dense feed-forward part."""
    names = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
    width = fields.number(*names, default=0)
    if not width and fields.type_name.startswith(_FOUR_TIMES):
        return 4 * hidden
    return width or fields.number(*names)


def _matrices(fields: Fields) -> int:
    """Return the number of matrices of a feed-forward part: three if it is gated."""
    kind = fields.type_name
    plain = fields.value("mlp_hidden_act") == "relu2"
    return 2 if plain or kind == "phi" or kind.startswith(_UNGATED) else 3
