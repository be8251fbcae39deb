"""Shapes of public models: the pages of their KV state, and the sizes of their layers.

Keys and values of a layer are two tensors of pages, as vLLM's attention kernels keep them. Sources:
the models' published config.json files.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from holdfast.blocks.layout import Layout
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import Pages
from holdfast.devices.page_format import plain_format
from holdfast_bench.measure.gpu.accelerator import Tensor

BLOCK_TOKENS = 128
"""Tokens of a block."""


class PageShape(NamedTuple):
    """Pages of one rank of a model: `tensors` of pages, and the bytes and tokens of one page."""

    model: str
    tensors: int
    page_bytes: int
    page_tokens: int

    @property
    def pages_per_block(self) -> int:
        return BLOCK_TOKENS // self.page_tokens

    @property
    def block_bytes(self) -> int:
        return self.tensors * self.page_bytes * self.pages_per_block

    def pages(self, tensors: list[Tensor]) -> Pages:
        """Return what a device needs to know of these tensors of whole pages."""
        bases = tuple(int(tensor.data_ptr()) for tensor in tensors)
        count = tensors[0].numel() * tensors[0].element_size() // self.page_bytes
        sizes = (self.page_bytes, self.page_bytes, count, self.pages_per_block)
        return Pages.uniform(bases, *sizes)

    def new_tensors(self, blocks: int, device: str) -> list[Tensor]:
        """Return tensors of random bytes for some blocks."""
        shape = (self.tensors, blocks * self.pages_per_block, self.page_bytes)
        return list(torch.randint(0, 256, shape, dtype=torch.uint8, device=device))


TOY_TOKENS, TOY_HEADS, TOY_HEAD_SIZE = 32, 2, 8

LLAMA_8B = PageShape("llama-3.1-8b", 2 * 32, 16 * 8 * 128 * 2, 16)
LLAMA_70B_RANK = PageShape("llama-3.1-70b-tp8", 2 * 80, 16 * 128 * 2, 16)
DEEPSEEK_V3 = PageShape("deepseek-v3", 61, 64 * 576 * 2, 64)
SHAPES = (LLAMA_8B, DEEPSEEK_V3, LLAMA_70B_RANK)
TOY = PageShape("toy", 4, TOY_TOKENS * TOY_HEADS * TOY_HEAD_SIZE * 2, TOY_TOKENS)


class FusedShape(NamedTuple):
    """Pages in which each token and head has its key beside its value, in bfloat16.

    FlashAttention of vLLM 0.32 has such pages, `[token][head][key|value]`.
    """

    model: str
    layers: int
    page_tokens: int
    heads: int
    head_size: int

    @property
    def pages(self) -> PageShape:
        """The pages as they are, one tensor for each layer."""
        page_bytes = self.page_tokens * self.heads * 2 * self.head_size * 2
        return PageShape(self.model, self.layers, page_bytes, self.page_tokens)

    @property
    def portable(self) -> PortablePages:
        """How the pages and portable blocks are converted."""
        sizes = (self.head_size, self.head_size)
        form = plain_format("nhd", self.heads, self.page_tokens, sizes, 2, fused=True)
        layout = Layout.portable(
            layers=self.layers, kv_heads=self.heads, head_size=self.head_size, dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        return PortablePages(form, layout.whole())


FUSED_8B = FusedShape("llama-3.1-8b", 32, 16, 8, 128)
FUSED_TOY = FusedShape("toy", 2, TOY_TOKENS, TOY_HEADS, TOY_HEAD_SIZE)


class DecoderShape(NamedTuple):
    """Sizes of one rank of a Llama-shaped decoder in bfloat16."""

    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    page_tokens: int = 16

    @property
    def pages(self) -> PageShape:
        """The pages of its KV state."""
        page_bytes = self.page_tokens * self.kv_heads * self.head_size * 2
        return PageShape(self.model, 2 * self.layers, page_bytes, self.page_tokens)


DECODERS = (
    DecoderShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
    DecoderShape("llama-3.1-70b-tp8", 80, 8192, 8, 1, 128, 3_584, 16_032),
)
TOY_DECODER = DecoderShape("toy", 2, 32, 4, 2, 8, 64, 128, page_tokens=32)
