"""The states of a transformers cache by KV group: which layers belong together, read and restored.

A probe of one token shows what each layer of a model keeps, whatever its architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import DynamicCache  # noqa: TC002  # as TC001
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from holdfast.blocks.fingerprint import Attention, KvGroup
from holdfast.blocks.layout import HeadState, PortableLayout
from holdfast.errors import BlockError

Tensor: TypeAlias = torch.Tensor

_CHUNKS = "chunked_attention"


class CacheLayers(NamedTuple):
    """Layers that attend alike: their KV group, their places in a cache, and their blocks."""

    kv_group: KvGroup
    places: tuple[int, ...]
    layout: PortableLayout


def groups_of(probe: Any, config: Any, block_tokens: int) -> list[CacheLayers]:
    """Return the groups of a model from a cache that it has filled.

    Raises BlockError for a layer whose states are not known.
    """
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    found: dict[tuple[Attention, int], list[int]] = {}
    for place, layer in enumerate(probe.layers):
        if type(layer) is DynamicLayer:
            found.setdefault(("full", 0), []).append(place)
        elif type(layer) is DynamicSlidingWindowLayer:
            attention: Attention = "chunk" if _CHUNKS in kinds[place : place + 1] else "window"
            found.setdefault((attention, layer.sliding_window), []).append(place)
        else:
            raise BlockError(
                f"layer {place} of the model keeps a {type(layer).__name__}, which is not cached; "
                "use generate without this cache"
            )
    return [
        CacheLayers(
            KvGroup(attention, window, tuple(places)),
            tuple(places),
            _portable_layout([probe.layers[place] for place in places], block_tokens),
        )
        for (attention, window), places in sorted(found.items())
    ]


def _portable_layout(layers: Sequence[Any], block_tokens: int) -> PortableLayout:
    states = tuple(
        HeadState(layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
        for layer in layers
    )
    return PortableLayout(dtype_name(layers[0].keys.dtype), block_tokens, states)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a data type as layouts write it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def last_states(group: CacheLayers, cache: Any, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of the last `tokens` tokens, on the CPU: `[head][token][dim]`."""
    layers = [cache.layers[place] for place in group.places]
    return [
        (layer.keys[0, :, -tokens:].cpu(), layer.values[0, :, -tokens:].cpu()) for layer in layers
    ]


def empty_states(group: CacheLayers, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Return memory on the CPU for keys and values of `tokens` tokens."""
    dtype = getattr(torch, group.layout.dtype)
    return [
        (
            torch.empty(state.heads, tokens, state.states[0][1], dtype=dtype),
            torch.empty(state.heads, tokens, state.states[1][1], dtype=dtype),
        )
        for state in group.layout.layers
    ]


def restore(
    group: CacheLayers,
    cache: DynamicCache,
    states: Sequence[tuple[Tensor, Tensor]],
    tokens: int,
    device: torch.device,
) -> None:
    """Put the states of the last tokens of a prefix of `tokens` tokens into an empty cache."""
    for place, of_layer in zip(group.places, states, strict=True):
        layer: Any = cache.layers[place]
        keys, values = (each[None].to(device) for each in of_layer)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.update(keys, values)  # it keeps the window
            layer.cumulative_length = tokens
        else:
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values  # `update` would copy them


def move(source: DynamicCache, target: Any, tokens: int) -> None:
    """Put the states of a dynamic cache of `tokens` tokens into an empty static one."""
    for ours, layer in zip(source.layers, target.layers, strict=True):
        keys, values = ours.keys, ours.values
        if hasattr(layer, "cumulative_length_int") and tokens >= layer.max_cache_len:
            # It keeps `window` tokens and drops the first of them before it attends.
            spare = layer.max_cache_len - keys.shape[-2]
            keys, values = (
                torch.nn.functional.pad(each, (0, 0, spare, 0)) for each in (keys, values)
            )
        layer.update(keys, values)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = tokens


def start_recording(cache: DynamicCache) -> None:
    """Let window layers keep all tokens of the next forward pass, until `stop_recording`."""
    for layer in window_layers(cache):
        layer.activate_past_recording()


def stop_recording(cache: DynamicCache) -> None:
    """Drop what window layers no longer need."""
    for layer in window_layers(cache):
        if layer.get_seq_length() >= layer.sliding_window:
            layer.crop(0)
        layer.record_past = False


def window_layers(cache: DynamicCache) -> Iterator[DynamicSlidingWindowLayer]:
    """Yield the layers that drop tokens."""
    yield from (layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer))
