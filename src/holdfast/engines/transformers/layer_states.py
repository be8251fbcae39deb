"""The states of a transformers cache by KV group: which layers belong together, read and restored.

A probe of one token shows what each layer of a model keeps, whatever its architecture. Attention
keeps keys and values of each token; a recurrent layer keeps states of one exact number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from holdfast.blocks.fingerprint import Attention, KvGroup
from holdfast.blocks.layout import ExactLayout, HeadState, PortableLayout, RankSlice
from holdfast.devices.context_tensors import blocks_to_tensors, tensors_to_blocks
from holdfast.errors import BlockError

Rows: TypeAlias = npt.NDArray[np.uint8]
"""Blocks, one a row."""

_ATTENTION = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_WINDOW = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_CHUNKS = "chunked_attention"

_AXES = 4
"""Axes of the keys of a layer: sequence, head, token, element."""


class AttentionLayers(NamedTuple):
    """Layers that attend alike, by their places in a cache; blocks are portable."""

    kv_group: KvGroup
    layout: PortableLayout
    places: tuple[int, ...]

    def new_blocks(self, first: int, stop: int) -> range:
        """Return the blocks that a forward pass of the tokens of blocks `first` to `stop` makes."""
        return range(first, stop)

    def read(self, cache: Any, rows: Rows, spare: int) -> None:
        """Fill rows with the last blocks of a cache, before its last `spare` tokens.

        Raises BlockError for a cache that does not keep them, such as a quantised one.
        """
        states = []
        for place in self.places:
            layer = cache.layers[place]
            kept = layer.keys.shape[-2] if layer.keys.ndim == _AXES else 0
            stop = min(int(layer.get_seq_length()), kept) - spare
            start = stop - len(rows) * self.layout.block_tokens
            if start < 0:
                raise BlockError(
                    f"cache: layer {place}, a {type(layer).__name__}, keeps {kept} tokens as the "
                    f"model computed them, and {kept - start} are to be saved; generate with a "
                    "DynamicCache or a StaticCache"
                )
            tokens = slice(start, stop)
            states.append((layer.keys[0, :, tokens].cpu(), layer.values[0, :, tokens].cpu()))
        rows[:] = tensors_to_blocks(self.layout, states)

    def restore(self, cache: Any, rows: Rows, tokens: int, device: torch.device) -> None:
        """Put the last blocks of a prefix of `tokens` tokens into an empty cache."""
        dtype, count = getattr(torch, self.layout.dtype), len(rows) * self.layout.block_tokens
        states = [
            tuple(torch.empty(layer.heads, count, size, dtype=dtype) for _, size in layer.states)
            for layer in self.layout.layers
        ]
        blocks_to_tensors(self.layout, rows, states)
        for place, of_layer in zip(self.places, states, strict=True):
            layer: Any = cache.layers[place]
            keys, values = (each[None].to(device) for each in of_layer)
            if isinstance(layer, DynamicSlidingWindowLayer):
                # It keeps the window, or a chunk: zeros stand for the part that is never read.
                spare = (0, 0, max(0, min(tokens, layer.sliding_window - 1) - count), 0)
                layer.update(*(torch.nn.functional.pad(each, spare) for each in (keys, values)))
                layer.cumulative_length = tokens
            else:
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values  # `update` would copy them


class StateSlot(NamedTuple):
    """A state of a recurrent layer: its place in the cache, which one it is, and its form."""

    place: int
    convolution: bool
    number: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def of(self, cache: Any) -> torch.Tensor:
        """Return the state in a cache."""
        layer = cache.layers[self.place]
        found = layer.conv_states if self.convolution else layer.recurrent_states
        state: torch.Tensor = found[self.number]
        return state[..., -self.shape[-1] :]  # a layer that records keeps more


class RecurrentLayers(NamedTuple):
    """Layers with recurrent states; a block is the states after its last token, one by one."""

    kv_group: KvGroup
    layout: ExactLayout
    slots: tuple[StateSlot, ...]

    def new_blocks(self, first: int, stop: int) -> range:
        """Return the blocks that a forward pass of the tokens of blocks `first` to `stop` makes."""
        del first
        return range(stop - 1, stop)

    def read(self, cache: Any, rows: Rows, spare: int) -> None:
        """Fill the only row with the states of a cache, which has no `spare` tokens."""
        del spare
        at = 0
        for slot in self.slots:
            state = slot.of(cache).cpu().contiguous().reshape(-1)
            dtype = str(state.dtype).removeprefix("torch.")
            if (dtype, state.nbytes) != (slot.dtype, slot.nbytes):
                raise BlockError(
                    f"cache: layer {slot.place} keeps a state of {state.nbytes} bytes of {dtype}, "
                    f"and the model's has {slot.nbytes} of {slot.dtype}"
                )
            rows[0, at : at + slot.nbytes] = state.view(torch.uint8).numpy()
            at += slot.nbytes
        rows[0, at:] = 0

    def restore(self, cache: Any, rows: Rows, tokens: int, device: torch.device) -> None:
        """Put the states after `tokens` tokens into an empty cache."""
        del tokens
        at = 0
        for slot in self.slots:
            stored = torch.from_numpy(rows[0, at : at + slot.nbytes].copy())
            state = stored.view(getattr(torch, slot.dtype)).reshape(slot.shape).to(device)
            _put_state(cache.layers[slot.place], slot, state)
            at += slot.nbytes


CacheLayers: TypeAlias = AttentionLayers | RecurrentLayers


def groups_of(probe: Any, config: Any, block_tokens: int) -> list[CacheLayers]:
    """Return the groups of a model from a cache that it has filled.

    Raises BlockError for a layer whose states are not known, and for a model without attention.
    """
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    attending: dict[tuple[Attention, int], list[int]] = {}
    slots: list[StateSlot] = []
    for place, layer in enumerate(probe.layers):
        kind = type(layer)
        if kind not in {*_ATTENTION, *_WINDOW, *_RECURRENT}:
            raise BlockError(
                f"layer {place} of the model keeps a {kind.__name__}, which is not cached; use "
                "generate without this cache"
            )
        if kind in _ATTENTION:
            attending.setdefault(("full", 0), []).append(place)
        elif kind in _WINDOW:
            attention: Attention = "chunk" if _CHUNKS in kinds[place : place + 1] else "window"
            attending.setdefault((attention, layer.sliding_window), []).append(place)
        if kind in _RECURRENT:
            slots += _slots_of(place, layer)
    if not attending:
        raise BlockError("the model keeps recurrent states only; use generate without this cache")
    keeping = sorted(
        {place for of in attending.values() for place in of} | {s.place for s in slots}
    )
    numbers = {place: number for number, place in enumerate(keeping)}
    found: list[CacheLayers] = [
        AttentionLayers(
            KvGroup(attention, window, tuple(numbers[place] for place in places)),
            _portable_layout([probe.layers[place] for place in places], block_tokens),
            tuple(places),
        )
        for (attention, window), places in sorted(attending.items())
    ]
    if slots:
        layers = tuple(sorted({numbers[slot.place] for slot in slots}))
        layout = _state_layout(slots, len(layers), block_tokens)
        found.append(RecurrentLayers(KvGroup("recurrent", 0, layers), layout, tuple(slots)))
    return found


def sequences_of(cache: Any) -> int:
    """Return the number of sequences in a cache: more than one of a batch, or of beams."""
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return max((each.shape[0] for each in keys if each is not None), default=1)


def move(source: Any, target: Any, tokens: int) -> None:
    """Put the states of a dynamic cache of `tokens` tokens into an empty static one."""
    for place, (ours, layer) in enumerate(zip(source.layers, target.layers, strict=True)):
        if type(ours) in _RECURRENT:
            for slot in _slots_of(place, ours):
                _put_state(layer, slot, slot.of(source))
        if not isinstance(ours, DynamicLayer):
            continue
        keys, values = ours.keys, ours.values
        if hasattr(layer, "cumulative_length_int") and tokens >= layer.max_cache_len:
            # It keeps `window` tokens and drops the first of them before it attends.
            spare = (0, 0, layer.max_cache_len - keys.shape[-2], 0)
            keys, values = (torch.nn.functional.pad(each, spare) for each in (keys, values))
        layer.update(keys, values)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = tokens


def start_recording(cache: Any) -> None:
    """Let window layers keep all tokens of the next forward pass, until `stop_recording`."""
    for layer in _window_layers(cache):
        layer.activate_past_recording()


def stop_recording(cache: Any) -> None:
    """Drop what window layers no longer need."""
    for layer in _window_layers(cache):
        layer.crop(0)
        layer.record_past = False


def _window_layers(cache: Any) -> Iterator[Any]:
    yield from (layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer))


def _slots_of(place: int, layer: Any) -> Iterator[StateSlot]:
    """Yield the states that a recurrent layer keeps; layers without attention may keep none."""
    for convolution, states in ((True, layer.conv_states), (False, layer.recurrent_states)):
        for number, state in states.items():
            if state is not None:
                shape, dtype = tuple(state.shape), str(state.dtype).removeprefix("torch.")
                yield StateSlot(place, convolution, number, shape, dtype, state.nbytes)


def _put_state(layer: Any, slot: StateSlot, state: torch.Tensor) -> None:
    if slot.convolution:
        layer.update_conv_state(state, slot.number)  # it also notes that there is a state
    else:
        layer.update_recurrent_state(state, slot.number)
        layer.has_previous_state[slot.number] = True


def _portable_layout(layers: Sequence[Any], block_tokens: int) -> PortableLayout:
    states = tuple(
        HeadState(layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1])
        for layer in layers
    )
    dtype = str(layers[0].keys.dtype).removeprefix("torch.")
    return PortableLayout(dtype, block_tokens, states)


def _state_layout(slots: Sequence[StateSlot], layers: int, block_tokens: int) -> ExactLayout:
    """Return the layout of blocks of states: one page a layer, with room for all its states."""
    nbytes = sum(slot.nbytes for slot in slots)
    return ExactLayout(
        dtype=slots[0].dtype,
        block_tokens=block_tokens,
        layers=layers,
        kv_heads=1,
        head_size=1,
        page_tokens=block_tokens,
        page_bytes=-(-nbytes // layers),
        packing=";".join(f"{'c' if s.convolution else 'r'}{s.shape}{s.dtype}" for s in slots),
        engine="transformers",
        engine_version=transformers.__version__,
        backend="cache",
        device="any",
        slice=RankSlice(0, 1, 0, 1),
    )
