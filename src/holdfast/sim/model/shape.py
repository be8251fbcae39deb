"""Bytes of KV state and prefill FLOP of a model's contexts.

With grouped-query attention (Ainslie et al., 2023) a token takes `2 * layers * kv_heads * head_dim`
elements, with multi-head latent attention (DeepSeek-V2, 2024) `layers * (latent + rope)`. Windowed,
chunked and recurrent layers keep a bounded or fixed state. Prefill takes `2 * active parameters`
FLOP per token, and FLOP of attention for every (query, key) pair. The results are estimates from
published shapes, accurate to a few per cent: kernel overhead, vision towers and draft heads are not
counted.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from holdfast.errors import ConfigError

DTYPE_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
    "nvfp4": 0.5625,
}
"""Bytes of one element of KV state. Only nvfp4 has scales of its own: a byte for 16 elements."""

WEIGHT_BITS = {
    **{dtype: 8 * nbytes for dtype, nbytes in DTYPE_BYTES.items()},
    "int4": 4.125,
    "mxfp4": 4.25,
}
"""Bits of one weight. With scales: 16 bits for 128 weights in int4, 8 bits for 32 in mxfp4 (OCP
Microscaling, 2023)."""


def dtype_bytes(dtype: str) -> float:
    """Return the bytes of one element. Raises ConfigError for a dtype that is not listed."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r}: not known; use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """The KV state of `layers` layers of one kind.

    `full` layers keep `elements` per `compression` tokens, and `index_bytes` for the indexer that
    selects the `top_k` entries a query reads (0: all): engines store an index key of
    `index_elements` in a type of its own. `window` layers keep the last `span` tokens, `chunk`
    layers at most the `span` tokens of the current chunk. `state` layers keep `elements` of
    `state_dtype` and `convolution_elements` per sequence of any length. A layer of two kinds counts
    in both. `fp8_bytes` and `nvfp4_bytes` are the bytes of an entry in these types if its layout
    has scales or unquantised parts; 0: the bytes of its elements.
    """

    kind: Literal["full", "window", "chunk", "state"]
    layers: int
    elements: int
    index_elements: int = 0
    index_bytes: float = 0.0
    fp8_bytes: int = 0
    nvfp4_bytes: int = 0
    compression: int = 1
    span: int = 0
    top_k: int = 0
    state_dtype: str = ""
    convolution_elements: int = 0
    pair_flop: int = 0
    """FLOP of one (query, key) pair in one layer, all heads: `2 * heads * (d_qk + d_v)`."""
    index_pair_flop: int = 0
    """FLOP to score one (query, key) pair with the indexer, in one layer."""

    def entry_bytes(self, dtype: str) -> float:
        """Return the bytes of one entry, without its index key."""
        packed = {"fp8": self.fp8_bytes, "nvfp4": self.nvfp4_bytes}.get(dtype, 0)
        return packed or self.elements * dtype_bytes(dtype)

    def pairs(self, new: int, context: int) -> float:
        """Return the (query, key) pairs per layer of `new` tokens after `context` tokens."""
        if self.kind == "state":
            return 0.0
        if self.kind == "window":
            return _capped(new, context, self.span)
        if self.kind == "chunk":  # the sum of (p modulo span) over the positions p
            sums = []
            for tokens in (context, context + new):
                whole, rest = divmod(tokens, self.span)
                sums.append((whole * self.span * self.span + rest * rest) / 2)
            return sums[1] - sums[0]
        cap = self.top_k * self.compression
        seen = _capped(new, context, cap) if cap else new * (context + new / 2)
        return seen / self.compression

    def prefill_flop(self, new: int, context: int) -> float:
        """Return the attention FLOP of `new` tokens after `context` tokens."""
        if self.kind == "state":  # one multiply-add to write each element, one to read it
            return 4.0 * self.layers * self.elements * new
        scored = new * (context + new / 2) / self.compression * self.index_pair_flop
        return self.layers * (self.pairs(new, context) * self.pair_flop + scored)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What sizing and simulation need of a model. Parameter counts are estimates."""

    name: str
    attention: tuple[Attention, ...]
    active_parameters: float
    """Parameters used per token, embeddings included."""
    parameters: float
    weights_bytes: float
    """Bytes of all weights, in their published precision unless another is asked for."""
    context_max: int
    """Maximum context in tokens; 0 if the config does not say."""
    kv_dtype: str = "bf16"
    """Type of the KV state that the config asks for; the default of the methods' `dtype`."""

    @property
    def recurrent(self) -> bool:
        """Whether layers keep recurrent state; such a context cannot be cut at every block."""
        return any(part.kind == "state" for part in self.attention)

    @property
    def windowed(self) -> bool:
        """Whether layers keep a window or a chunk of the context."""
        return any(part.kind in ("window", "chunk") for part in self.attention)

    def kv_bytes_per_token(self, dtype: str = "") -> float:
        """Return the bytes by which a context grows with each token, index keys included."""
        return sum(
            part.layers
            * (part.entry_bytes(dtype or self.kv_dtype) + part.index_bytes)
            / part.compression
            for part in self.attention
            if part.kind == "full"
        )

    def windows(self, dtype: str = "") -> list[tuple[int, float]]:
        """Return the spans of windowed and chunked layers, each with the bytes of a token in it."""
        return [
            (part.span, part.layers * part.entry_bytes(dtype or self.kv_dtype))
            for part in self.attention
            if part.kind in ("window", "chunk")
        ]

    def window_bytes(self) -> float:
        """Return the maximum bytes that windowed and chunked layers keep of a sequence."""
        return sum(span * token_bytes for span, token_bytes in self.windows())

    def state_bytes(self) -> float:
        """Return the bytes of recurrent state of one sequence: the size of a checkpoint."""
        return sum(
            part.layers * part.elements * dtype_bytes(part.state_dtype)
            + part.layers * part.convolution_elements * dtype_bytes("bf16")
            for part in self.attention
            if part.kind == "state"
        )

    def fixed_bytes(self) -> float:
        """Return the bytes of a long sequence that do not grow with its length."""
        return self.window_bytes() + self.state_bytes()

    def context_bytes(self, tokens: int) -> float:
        """Return the bytes of one context of `tokens` tokens."""
        bounded = sum(min(span, tokens) * token_bytes for span, token_bytes in self.windows())
        return tokens * self.kv_bytes_per_token() + bounded + self.state_bytes()

    def with_weights(self, dtype: str) -> ModelShape:
        """Return this model with all weights in another type, one of WEIGHT_BITS.

        The bytes are those of all parameters in this type; FLOP/s of the GPU do not change.
        Raises ConfigError for another type.
        """
        if dtype not in WEIGHT_BITS:
            raise ConfigError(
                f"--weights-dtype {dtype!r}: not known; use one of {', '.join(WEIGHT_BITS)}"
            )
        return replace(self, weights_bytes=self.parameters * WEIGHT_BITS[dtype] / 8)

    def prefill_flop(self, new: int, context: int = 0) -> float:
        """Return the FLOP to compute `new` tokens after `context` tokens that are held."""
        attention = sum(part.prefill_flop(new, context) for part in self.attention)
        return 2.0 * self.active_parameters * new + attention

    def check_context(self, tokens: int) -> None:
        """Raise ConfigError if the model does not support a context of this length."""
        if tokens < 1:
            raise ConfigError(f"context: {tokens} tokens; at least 1")
        if self.context_max and tokens > self.context_max:
            raise ConfigError(
                f"context: {tokens:,} tokens, but {self.name} takes at most "
                f"{self.context_max:,} (max_position_embeddings); use a shorter context, or give a "
                "config.json with its rope scaling applied"
            )


def _capped(new: int, context: int, cap: int) -> float:
    """Return the sum of min(p, cap) over the positions p of `new` tokens after `context`."""
    rising = min(max(cap - context, 0), new)
    return rising * (context + rising / 2) + (new - rising) * cap
