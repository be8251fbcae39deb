"""Estimates of a model's parameters: in total, active per token, and their bytes.

Only matrices count. Norms, biases, sinks, draft heads and vision towers are left out: less than one
per cent of each shipped model. Embedding and output matrices count, as in published figures.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.sim.model.fields import Fields
from holdfast.sim.model.layers import Layer, Mixer, experts_of

BITS_PER_BYTE = 8
_EXPERT_BITS_MX = 4.25
"""Four bits per weight and an eight-bit scale per 32 weights (OCP Microscaling, 2023)."""


class ParameterCount(NamedTuple):
    """Parameters active per token, in total, and in routed experts."""

    active: float = 0.0
    total: float = 0.0
    routed: float = 0.0

    def plus(self, other: ParameterCount) -> ParameterCount:
        """Return the sum."""
        return ParameterCount(*(a + b for a, b in zip(self, other, strict=True)))


def count(fields: Fields, layers: list[Layer]) -> ParameterCount:
    """Return the parameters of a whole model."""
    hidden = fields.number("hidden_size")
    tied = bool(fields.value("tie_word_embeddings"))
    ends = fields.number("vocab_size") * hidden * (1 if tied else 2)
    counted = ParameterCount(ends, ends)
    mixers = {mixer: _mixer(fields, mixer, hidden) for mixer in {layer.mixer for layer in layers}}
    feeds = {feed: _feed(fields, feed, hidden) for feed in {layer.feed for layer in layers}}
    for layer in layers:
        weights = mixers[layer.mixer]
        counted = counted.plus(ParameterCount(weights, weights)).plus(feeds[layer.feed])
    return counted


def weights_bytes(fields: Fields, counted: ParameterCount) -> float:
    """Return the bytes of all weights in their published precision."""
    dtype = str(fields.value("torch_dtype", "dtype"))
    plain = 32.0 if dtype == "float32" else 16.0
    routed_bits = other_bits = plain  # bits per weight of routed experts, and of all others
    quantization = fields.section("quantization_config") or Fields({}, fields.name)
    method = str(quantization.value("quant_method"))
    if "fp8" in method:
        other_bits = 8.0
        routed_bits = _EXPERT_BITS_MX if fields.value("expert_dtype") == "fp4" else other_bits
    elif method == "mxfp4":
        routed_bits = _EXPERT_BITS_MX
    elif method == "compressed-tensors":
        groups = quantization.section("config_groups")
        group = groups and groups.section("group_0")
        weights = group and group.section("weights")
        if weights:
            scale_bits = 8.0 if "mxfp4" in str(quantization.value("format")) else plain
            size = weights.number("group_size", default=128) or 128
            routed_bits = weights.number("num_bits", default=16) + scale_bits / size
    elif method in ("gptq", "awq"):
        size = quantization.number("group_size", default=128) or 128
        routed_bits = other_bits = quantization.number("bits", default=16) + plain / size
    other = counted.total - counted.routed
    return (counted.routed * routed_bits + other * other_bits) / BITS_PER_BYTE


def heads(fields: Fields, *, windowed: bool) -> tuple[int, int, int, int]:
    """Return query heads, KV heads, key size and value size of full or windowed layers."""
    query = fields.number("num_attention_heads")
    kv = fields.number("num_key_value_heads", default=query, least=1)
    width = fields.number("hidden_size") // max(query, 1)
    size = fields.number("head_dim", default=width, least=1)
    value = fields.number("v_head_dim", default=size, least=1)
    if windowed:
        return (
            fields.number("swa_num_attention_heads", default=query, least=1),
            fields.number("swa_num_key_value_heads", default=kv, least=1),
            fields.number("swa_head_dim", default=size, least=1),
            fields.number("swa_v_head_dim", default=value, least=1),
        )
    wide = fields.number("global_head_dim", default=0)
    return (
        query,
        fields.number("num_global_key_value_heads", default=kv, least=1),
        wide or size,
        wide or value,
    )


def _mixer(fields: Fields, mixer: Mixer, hidden: int) -> float:
    if mixer == "none":
        return 0.0
    if mixer == "linear":  # gated delta rule
        nested = fields.section("linear_attn_config")
        if nested is not None:  # one head size, as in Kimi
            number, size = nested.number("num_heads"), nested.number("head_dim")
            width = number * size
            return 5 * hidden * width + size * (hidden + width) + hidden * number
        keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
        value_heads = fields.number("linear_num_value_heads")
        values = value_heads * fields.number("linear_value_head_dim")
        return hidden * (2 * keys + 3 * values + 2 * value_heads)
    if mixer == "mamba":
        sizes = mamba_sizes(fields)
        if not sizes.heads:
            auto = fields.value("mamba_dt_rank") in (None, "auto")
            dt_rank = -(-hidden // 16) if auto else fields.number("mamba_dt_rank")
            return 3 * hidden * sizes.inner + sizes.inner * (2 * dt_rank + 3 * sizes.state)
        into = 2 * sizes.inner + 2 * sizes.groups * sizes.state + sizes.heads
        return hidden * into + sizes.inner * hidden
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
    query, kv, key_size, value_size = heads(fields, windowed=mixer == "window")
    gate = 2 if fields.value("attn_output_gate") else 1
    projections = gate * query * key_size + kv * (key_size + value_size) + query * value_size
    return hidden * projections


class MambaSizes(NamedTuple):
    """Sizes of a Mamba layer; `inner` is the width of all heads together."""

    heads: int
    """Number of heads; 0 for Mamba-1, which has neither heads nor groups."""
    inner: int
    groups: int
    state: int


def mamba_sizes(fields: Fields) -> MambaSizes:
    """Return the sizes, from the fields of Jamba (Mamba-1), Nemotron, or Bamba and Granite."""
    headless = fields.value("mamba_num_heads", "mamba_n_heads") is None
    if headless and fields.value("mamba_expand") is not None:
        inner = fields.number("mamba_expand") * fields.number("hidden_size")
        return MambaSizes(0, inner, 0, fields.number("mamba_d_state"))
    number = fields.number("mamba_num_heads", "mamba_n_heads", least=1)
    if fields.value("mamba_head_dim", "mamba_d_head") in (None, "auto"):
        inner = fields.number("mamba_expand") * fields.number("hidden_size")
    else:
        inner = number * fields.number("mamba_head_dim", "mamba_d_head")
    groups = fields.number("n_groups", "mamba_n_groups")
    return MambaSizes(number, inner, groups, fields.number("ssm_state_size", "mamba_d_state"))


def _feed(fields: Fields, feed: str, hidden: int) -> ParameterCount:
    if feed == "none":
        return ParameterCount()
    if feed == "dense":
        inner = fields.number("intermediate_size_mlp", "intermediate_size")
        weights = _matrices(fields) * hidden * inner
        return ParameterCount(weights, weights)
    number = experts_of(fields)
    chosen = fields.number(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"
    )
    inner = fields.number("moe_intermediate_size", "intermediate_size")
    narrow = fields.number("routed_expert_hidden_size", "moe_latent_size", default=0)
    each = _matrices(fields) * (narrow or hidden) * inner
    router = hidden * number + 2 * hidden * narrow
    shared = fields.number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=0,
    )
    if not shared:  # inner width of the experts that every token uses
        default = 1 if str(fields.value("model_type")).startswith("llama4") else 0
        names = ("n_shared_experts", "num_shared_experts")
        shared = fields.number(*names, default=default) * inner
    always = router + _matrices(fields) * hidden * shared
    sparse = ParameterCount(chosen * each + always, number * each + always, number * each)
    return sparse.plus(_feed(fields, "dense", hidden)) if feed == "both" else sparse


def _matrices(fields: Fields) -> int:
    """Return the number of matrices of a feed-forward part: three if it is gated."""
    return 2 if fields.value("mlp_hidden_act") == "relu2" else 3
