"""A Llama-shaped decoder with random weights, in plain PyTorch, whose KV state lies in pages.

It has the operations that take a decoder's time: projections, rotary positions, attention with
grouped heads, a gated feed-forward part. Its text means nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from holdfast_bench.measure.gpu.accelerator import Tensor
from holdfast_bench.measure.gpu.shapes import DecoderShape

SEED = 20_26
MLP_TOKENS = 16_384
"""Tokens of one pass of the feed-forward part, whose state between is the largest of all."""

_DEVIATION = 0.02
_ROPE_BASE = 500_000.0
_EPSILON = 1e-5


class _Layer(NamedTuple):
    query_key_value: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """A decoder on a device of PyTorch, with pages for `blocks` blocks.

    `pages`: for each layer the pages of its keys, then those of its values. Token t of the one
    context is in page t // page_tokens.
    """

    def __init__(self, shape: DecoderShape, blocks: int, device: str) -> None:
        self.shape = shape
        self._device = device
        self._random = torch.Generator(device).manual_seed(SEED)
        self.pages: list[Tensor] = [
            torch.zeros(blocks * shape.pages.pages_per_block, shape.pages.page_bytes // 2,
                        dtype=torch.bfloat16, device=device)
            for _ in range(shape.pages.tensors)
        ]  # fmt: skip
        size = shape.head_size
        self._embedding = self._weights(shape.vocabulary, shape.hidden)
        self._head = self._weights(shape.vocabulary, shape.hidden)
        self._layers = [
            _Layer(
                self._weights((shape.heads + 2 * shape.kv_heads) * size, shape.hidden),
                self._weights(shape.hidden, shape.heads * size),
                self._weights(2 * shape.intermediate, shape.hidden),
                self._weights(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        steps = torch.arange(0, size, 2, device=device, dtype=torch.float32)
        self._frequencies = _ROPE_BASE ** (-steps / size)

    def tokens(self, count: int) -> Tensor:
        """Return random tokens."""
        return torch.randint(
            0, self.shape.vocabulary, (count,), generator=self._random, device=self._device
        )

    def logits(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Compute tokens from position `start` on, of which only one may follow cached ones.

        Writes their keys and values to the pages; returns the logits after the last token.
        """
        count = len(tokens)
        if start and count != 1:
            raise ValueError(f"{count} tokens after {start} cached ones; pass one")
        with torch.inference_mode():
            return self._forward(tokens, start)

    def clear(self) -> None:
        """Overwrite all pages."""
        for pages in self.pages:
            pages.zero_()

    def _forward(self, tokens: Tensor, start: int) -> Tensor:
        count, state = len(tokens), self._embedding[tokens]
        angles = torch.arange(start, start + count, device=self._device)[:, None]
        turned = (angles * self._frequencies).repeat(1, 2)
        cos, sin = turned.cos()[:, None].bfloat16(), turned.sin()[:, None].bfloat16()
        for number, layer in enumerate(self._layers):
            state = state + self._attention(number, layer, state, (cos, sin), start)
            for at in range(0, count, MLP_TOKENS):
                part = state[at : at + MLP_TOKENS]
                gate, up = (_normed(part) @ layer.gate_up.T).chunk(2, dim=-1)
                part += (functional.silu(gate) * up) @ layer.down.T
        return _normed(state[-1:]) @ self._head.T

    def _attention(
        self, number: int, layer: _Layer, state: Tensor, turn: tuple[Tensor, Tensor], start: int
    ) -> Tensor:
        shape, count = self.shape, len(state)
        size, end = shape.head_size, start + count
        mixed = (_normed(state) @ layer.query_key_value.T).view(count, -1, size)
        query = _turned(mixed[:, : shape.heads], *turn)
        keys, values = (
            pages.view(-1, shape.kv_heads, size)[:end]
            for pages in self.pages[2 * number : 2 * number + 2]
        )
        keys[start:] = _turned(mixed[:, shape.heads : shape.heads + shape.kv_heads], *turn)
        values[start:] = mixed[:, shape.heads + shape.kv_heads :]
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            is_causal=count > 1,
            enable_gqa=True,
        )
        return mixed[0].transpose(0, 1).reshape(count, -1) @ layer.output.T

    def _weights(self, rows: int, columns: int) -> Tensor:
        empty = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)
        return empty.normal_(0.0, _DEVIATION, generator=self._random)


def _normed(state: Tensor) -> Tensor:
    return functional.rms_norm(state, state.shape[-1:], eps=_EPSILON)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads with rotary positions."""
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin
