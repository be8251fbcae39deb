"""A real model's cache through a session: transformers' `DynamicCache`, filled by a device.

A random Llama computes a context and continues it. The context's keys and values are saved from
pages through Holdfast's device and a `Session`, erased, fetched and loaded into pages, of which a
new `DynamicCache` is made. The model continues with that cache, in the same shapes; each logit must
be the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.blocks.layout import ExactLayout, RankSlice
from holdfast.buffers import SharedMapping
from holdfast.devices.base import Move
from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast.testing.embedded import fingerprint_for
from holdfast.tiers.arena import Arena
from holdfast_bench.measure.gpu.accelerator import HostAccelerator, Tensor
from holdfast_bench.measure.gpu.block_copies import load, save
from holdfast_bench.measure.gpu.shapes import BLOCK_TOKENS, DecoderShape

SEED = 20_26
TAIL_TOKENS = 20
"""Tokens after the context that are computed together; the others are generated."""

NEW_TOKENS = 12


class CachedModel:
    """A random Llama of transformers, a context of whole blocks, and pages for its cache."""

    def __init__(self, gpu: HostAccelerator, shape: DecoderShape, blocks: int) -> None:
        transformers = _transformers()
        torch.manual_seed(SEED)
        config = transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_size,
        )
        self._model: Any = transformers.LlamaForCausalLM(config).to(gpu.kind, torch.bfloat16).eval()
        self.shape = shape
        self.context_tokens = blocks * BLOCK_TOKENS
        self.tokens: Tensor = torch.randint(
            0, shape.vocabulary, (1, self.context_tokens + TAIL_TOKENS), device=gpu.kind
        )
        size = (self.context_tokens, shape.kv_heads, shape.head_size)
        self.pages: list[Tensor] = [
            torch.zeros(size, dtype=torch.bfloat16, device=gpu.kind)
            for _ in range(shape.pages.tensors)
        ]

    def compute(self) -> Any:  # noqa: ANN401  # of transformers
        """Compute the context, put its keys and values into the pages; return its own cache."""
        cache = _transformers().DynamicCache()
        self._step(self.tokens[:, : self.context_tokens], cache)
        for number, layer in enumerate(cache.layers):
            states = layer.keys, layer.values
            for pages, state in zip(self._pages_of(number), states, strict=True):
                pages.copy_(state[0].transpose(0, 1))
        return cache

    def cache_from_pages(self) -> Any:  # noqa: ANN401  # of transformers
        """Return a new cache of the context, made of the pages."""
        cache = _transformers().DynamicCache()
        for number in range(self.shape.layers):
            keys, values = (pages.transpose(0, 1)[None] for pages in self._pages_of(number))
            cache.update(keys, values, number)
        return cache

    def continued(self, cache: Any) -> list[Tensor]:  # noqa: ANN401  # of transformers
        """Continue with a cache of the context; return the logits of each step."""
        found = [self._step(self.tokens[:, self.context_tokens :], cache)]
        for _ in range(NEW_TOKENS):
            found.append(self._step(found[-1][:, -1:].argmax(-1), cache))
        return found

    def clear(self) -> None:
        """Overwrite all pages."""
        for pages in self.pages:
            pages.zero_()

    def _pages_of(self, layer: int) -> list[Tensor]:
        return self.pages[2 * layer : 2 * layer + 2]

    def _step(self, tokens: Tensor, cache: Any) -> Tensor:  # noqa: ANN401  # of transformers
        with torch.inference_mode():
            logits: Tensor = self._model(tokens, past_key_values=cache, use_cache=True).logits
        return logits


def same_generation(gpu: HostAccelerator, shape: DecoderShape, blocks: int) -> int:
    """Return how many tokens a model generated with its cache from Holdfast as without it.

    Raises HoldfastError if a block was not held or a logit differs, and ImportError without
    transformers.
    """
    model = CachedModel(gpu, shape, blocks)
    expected = model.continued(model.compute())
    context = model.tokens[0, : model.context_tokens].tolist()
    block_bytes = shape.pages.block_bytes
    staging = Arena(blocks * block_bytes)
    with (
        closing(staging),
        closing(gpu.device(shape.pages.pages(model.pages), model.pages)) as device,
        holdfast.open(host=2 * blocks * block_bytes + 64 * MIB) as store,
    ):
        mapped = SharedMapping(staging.fd, staging.nbytes)
        rows = np.frombuffer(mapped.view, np.uint8).reshape(blocks, block_bytes)
        session = store.session(fingerprint_for(_layout(shape)))
        save(device, mapped, _moves(shape, blocks))
        if session.save(context, rows) != blocks:
            raise HoldfastError(f"not all of {blocks} blocks were saved")
        model.clear()
        rows[:] = 0
        landed = session.fetch(context, rows)
        if landed.blocks != blocks:
            raise HoldfastError(f"{landed.blocks} of {blocks} blocks landed: {landed.reason}")
        load(device, mapped, _moves(shape, blocks))
        gpu.synchronise()
    found = model.continued(model.cache_from_pages())
    if not all(map(torch.equal, found, expected)):
        raise HoldfastError("a model generates other logits with its cache from Holdfast")
    return len(found) - 1


def _transformers() -> Any:  # noqa: ANN401  # its types differ between versions
    return import_module("transformers")


def _moves(shape: DecoderShape, blocks: int) -> Sequence[Move]:
    size = shape.pages.pages_per_block
    return [
        Move(block * shape.pages.block_bytes, range(block * size, (block + 1) * size))
        for block in range(blocks)
    ]


def _layout(shape: DecoderShape) -> ExactLayout:
    return ExactLayout(
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        page_tokens=shape.page_tokens,
        page_bytes=2 * shape.pages.page_bytes,
        packing="pages of keys, then of values",
        engine="transformers",
        engine_version="bench",
        backend="sdpa",
        device="bench",
        slice=RankSlice(0, 1, 0, 1),
    )
