"""What a model's context costs: bytes to keep, FLOP to compute, from the numbers of its config.

The formulas are the usual ones. With grouped-query attention (Ainslie et al., 2023) a token takes
`2 * layers * kv_heads * head_dim` elements, with multi-head latent attention (DeepSeek-V2, 2024)
`layers * (latent + rope)`; windowed, chunked and recurrent layers keep a bounded or fixed state
instead. To prefill takes `2 * active parameters` FLOP a token, and attention on top for every
(query, key) pair. All is an estimate from published shapes, good to a few per cent: no kernel's
overhead, no vision tower, no draft head is in it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.errors import ConfigError

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
"""Bytes of one element of KV state; scales of quantised formats are left out."""


def dtype_bytes(dtype: str) -> float:
    """Return the bytes of one element. Raises ConfigError for a dtype that is not listed."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r}: not known; use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which `layers` layers of a model remember what was before.

    `full` layers keep `elements` per token, or per `compression` tokens, and `index_elements`
    beside them for choosing which `top_k` entries a query reads (0: all). `window` layers keep the
    last `span` tokens, `chunk` layers at most the `span` tokens of the chunk they are in. `state`
    layers keep `elements` of `state_dtype` and `convolution_elements` per sequence, however long.
    A layer that does two of these counts in both.
    """

    kind: Literal["full", "window", "chunk", "state"]
    layers: int
    elements: int
    index_elements: int = 0
    compression: int = 1
    span: int = 0
    top_k: int = 0
    state_dtype: str = ""
    convolution_elements: int = 0
    pair_flop: int = 0
    """FLOP of one (query, key) pair in one layer, all heads: `2 * heads * (d_qk + d_v)`."""
    index_pair_flop: int = 0
    """FLOP to score one (query, key) pair with the indexer, in one layer."""

    def pairs(self, new: int, context: int) -> float:
        """Return how many (query, key) pairs `new` tokens behind `context` attend to, a layer."""
        if self.kind == "state":
            return 0.0
        if self.kind == "window":
            return _capped(new, context, self.span)
        if self.kind == "chunk":
            return _chunked(new, context, self.span)
        cap = self.top_k * self.compression
        seen = _capped(new, context, cap) if cap else new * (context + new / 2)
        return seen / self.compression

    def prefill_flop(self, new: int, context: int) -> float:
        """Return the FLOP that `new` tokens behind `context` spend here beside the weights."""
        if self.kind == "state":  # one multiply-add to write each element, one to read it
            return 4.0 * self.layers * self.elements * new
        scored = new * (context + new / 2) / self.compression * self.index_pair_flop
        return self.layers * (self.pairs(new, context) * self.pair_flop + scored)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as far as its context memory goes. Counts of parameters are estimates."""

    name: str
    attention: tuple[Attention, ...]
    active_parameters: float
    """Parameters that one token passes through, embeddings included."""
    parameters: float
    weights_bytes: float
    """Bytes of all weights as published."""
    context_max: int
    """Most tokens of context; 0 where the config does not say."""

    @property
    def recurrent(self) -> bool:
        """Whether layers keep recurrent state, so that a context can not be cut at every block."""
        return any(part.kind == "state" for part in self.attention)

    @property
    def index_elements_per_token(self) -> float:
        """Elements per token that only an indexer reads; part of `kv_bytes_per_token`."""
        growing = (part for part in self.attention if part.kind == "full")
        return sum(part.layers * part.index_elements / part.compression for part in growing)

    def kv_bytes_per_token(self, dtype: str = "bf16") -> float:
        """Return the bytes by which a context grows with each token, indexer keys included."""
        elements = self.index_elements_per_token + sum(
            part.layers * part.elements / part.compression
            for part in self.attention
            if part.kind == "full"
        )
        return elements * dtype_bytes(dtype)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """Spans of windowed and chunked layers, each with the elements of a token within it."""
        bounded = (part for part in self.attention if part.kind in ("window", "chunk"))
        return [(part.span, part.layers * part.elements) for part in bounded]

    def window_bytes(self, dtype: str = "bf16") -> float:
        """Return the most that windowed and chunked layers keep of one sequence, in bytes."""
        return sum(span * elements for span, elements in self.windows) * dtype_bytes(dtype)

    def state_bytes(self) -> float:
        """Return what recurrent layers keep of one sequence, in bytes: the size of a checkpoint."""
        return sum(
            part.layers * part.elements * dtype_bytes(part.state_dtype)
            + part.layers * part.convolution_elements * dtype_bytes("bf16")
            for part in self.attention
            if part.kind == "state"
        )

    def fixed_bytes(self, dtype: str = "bf16") -> float:
        """Return the bytes of a long sequence that do not grow with it."""
        return self.window_bytes(dtype) + self.state_bytes()

    def context_bytes(self, tokens: int, dtype: str = "bf16") -> float:
        """Return the bytes of one context of `tokens` tokens."""
        bounded = sum(min(span, tokens) * elements for span, elements in self.windows)
        growing = tokens * self.kv_bytes_per_token(dtype)
        return growing + bounded * dtype_bytes(dtype) + self.state_bytes()

    def prefill_flop(self, new: int, context: int = 0) -> float:
        """Return the FLOP to compute `new` tokens behind `context` tokens that are held."""
        attention = sum(part.prefill_flop(new, context) for part in self.attention)
        return 2.0 * self.active_parameters * new + attention

    def check_context(self, tokens: int) -> None:
        """Raise ConfigError if a context is longer than the model takes."""
        if tokens < 1:
            raise ConfigError(f"context: {tokens} tokens; at least 1")
        if self.context_max and tokens > self.context_max:
            raise ConfigError(
                f"context: {tokens:,} tokens, but {self.name} takes at most "
                f"{self.context_max:,} (max_position_embeddings); ask for less, or give a "
                "config.json with its rope scaling applied"
            )


def _capped(new: int, context: int, cap: int) -> float:
    """Return the sum of min(p, cap) over the positions p that `new` tokens take."""
    rising = min(max(cap - context, 0), new)
    return rising * (context + rising / 2) + (new - rising) * cap


def _chunked(new: int, context: int, chunk: int) -> float:
    """Return the sum of (p modulo chunk) over the positions p that `new` tokens take."""

    def until(tokens: int) -> float:
        whole, rest = divmod(tokens, chunk)
        return (whole * chunk * chunk + rest * rest) / 2

    return until(context + new) - until(context)
