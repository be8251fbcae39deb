"""The layout of a block's payload: `portable`, `exact` pages of one engine, or `opaque` bytes.

A portable payload is head-major: per layer `[k|v][head][token][dim]`, keys after rotation, without
gaps. So the heads of one tensor-parallel rank are one range per layer and state, which a
`LayoutSlice` describes. An exact payload consists of whole pages of one engine, copied and never
interpreted. An opaque payload is what an engine hands over as one piece of memory. Offsets and
lengths are in bytes from the start of the payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import msgspec

from holdfast.errors import BlockError
from holdfast.limits import LAYERS_MAX, PAYLOAD_BYTES_MAX
from holdfast.prepared import prepared

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Element sizes of the data types that a portable layout may have."""


class State(StrEnum):
    """What a run of a portable payload holds: keys, values, or the latent of MLA."""

    KEYS = "k"
    VALUES = "v"
    LATENT = "latent"


class StateRun(NamedTuple):
    """Consecutive heads of one state of one layer: one range of a portable payload.

    Its bytes are `[head][token][dim]`. A latent has no heads, and counts as one.
    """

    layer: int
    state: State
    heads: range
    offset: int
    nbytes: int


@prepared
class HeadState(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="heads"
):
    """The state of one layer with heads: keys, then values, each `[head][token][dim]`.

    `key_size` and `value_size` are elements of one head and token.
    """

    kv_heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            _check_count(f"layout.layers: {field}", getattr(self, field))

    @property
    def heads(self) -> int:
        """Ranges into which the state can be divided: its heads."""
        return self.kv_heads

    @property
    def states(self) -> tuple[tuple[State, int], ...]:
        """The states in the order of the payload, and their elements per head and token."""
        return (State.KEYS, self.key_size), (State.VALUES, self.value_size)


@prepared
class LatentState(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="latent"
):
    """The state of one MLA layer: `[token][latent]`.

    A latent of `latent_size` elements is the compressed KV, then the rotated key that all heads
    share. Tensor-parallel ranks hold copies of it, so it cannot be divided.
    """

    latent_size: int

    def __post_init__(self) -> None:
        _check_count("layout.layers: latent_size", self.latent_size)

    @property
    def heads(self) -> int:
        """Ranges into which the state can be divided: one."""
        return 1

    @property
    def states(self) -> tuple[tuple[State, int], ...]:
        """The state, and its elements per token."""
        return ((State.LATENT, self.latent_size),)


LayerState: TypeAlias = HeadState | LatentState


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The arrangement of one block's payload; every field is part of the fingerprint.

    A layout is a `PortableLayout`, a `QuantisedLayout`, an `ExactLayout` or an `OpaqueLayout`.
    """

    dtype: str
    block_tokens: int

    @staticmethod
    def portable(
        *,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: str,
        block_tokens: int,
        value_size: int | None = None,
    ) -> PortableLayout:
        """Return the portable layout of a model whose layers are alike.

        `head_size`: elements of a key; a value has `value_size` elements, by default as many.
        """
        _check_layers(layers)
        layer = HeadState(kv_heads, head_size, head_size if value_size is None else value_size)
        return PortableLayout(dtype, block_tokens, (layer,) * layers)

    @staticmethod
    def portable_latent(
        *, layers: int, latent_size: int, dtype: str, block_tokens: int
    ) -> PortableLayout:
        """Return the portable layout of a model with MLA in every layer."""
        _check_layers(layers)
        return PortableLayout(dtype, block_tokens, (LatentState(latent_size),) * layers)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 1 for a data type that is not known."""
        return DTYPE_BYTES.get(self.dtype, 1)

    @property
    def raw_bytes(self) -> int:
        """Bytes of one block, all layers."""
        raise NotImplementedError


@prepared
class PortableLayout(Layout, frozen=True, forbid_unknown_fields=True, tag="portable"):
    """The layout that every engine on every device can write and read: layers one by one.

    Layers may differ in kind, heads and sizes.
    """

    layers: tuple[LayerState, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise BlockError(f"layout.dtype {self.dtype!r} is unknown; known: {known}")
        _check_count("layout.block_tokens", self.block_tokens)
        _check_layers(len(self.layers))
        _check_payload(self.raw_bytes)

    @property
    def raw_bytes(self) -> int:
        return sum(self.layer_bytes(layer) for layer in range(len(self.layers)))

    def layer_bytes(self, layer: int) -> int:
        """Return the bytes of one layer."""
        state = self.layers[layer]
        return state.heads * sum(self.head_bytes(size) for _, size in state.states)

    def layer_offsets(self) -> list[int]:
        """Return where each layer starts, and at the end where the payload ends."""
        return list(accumulate(map(self.layer_bytes, range(len(self.layers))), initial=0))

    def head_bytes(self, size: int) -> int:
        """Return the bytes of one head of `size` elements: `[token][dim]`."""
        return self.block_tokens * size * self.element_bytes

    def whole(self) -> LayoutSlice:
        """Return the slice that is the whole payload."""
        return self.slice()

    def slice(self, layers: range | None = None, heads: range | None = None) -> LayoutSlice:
        """Return the slice of these layers, and of these heads in each of them.

        By default all layers, and all heads. A latent is one head. Raises BlockError for layers or
        heads that the layout does not have.
        """
        count = len(self.layers)
        layers = range(count) if layers is None else layers
        _check_range("layers", layers, count, f"the layout has {count}")
        chosen = [range(0)] * count
        for layer in layers:
            most = self.layers[layer].heads
            chosen[layer] = range(most) if heads is None else heads
            _check_range("heads", chosen[layer], most, f"layer {layer} has {most}")
        return LayoutSlice(self, tuple(chosen), tuple(chosen))

    def rank(self, tp_rank: int, tp_size: int, layers: range | None = None) -> LayoutSlice:
        """Return the slice of one of `tp_size` tensor-parallel ranks.

        A rank has an equal share of each layer's heads. If ranks outnumber heads, a head is on
        several ranks, and a latent on all of them; the first of them writes it. `layers` are those
        of the rank's pipeline stage. Raises BlockError for a rank or size that does not fit.
        """
        _check_count("tp_size", tp_size)
        if not 0 <= tp_rank < tp_size:
            raise BlockError(f"tp_rank is {tp_rank}; with tp_size {tp_size} it is below {tp_size}")
        chosen = list(self.slice(layers).heads)
        written = list(chosen)
        for layer, all_heads in enumerate(chosen):
            if all_heads:
                chosen[layer], written[layer] = _rank_heads(layer, len(all_heads), tp_rank, tp_size)
        return LayoutSlice(self, tuple(chosen), tuple(written))


@prepared
class QuantisedLayout(PortableLayout, frozen=True, forbid_unknown_fields=True, tag="quantised"):
    """The portable layout of blocks that a lossy codec has changed, before any engine read them.

    Payloads are arranged as in the portable layout. `codec` and its version say which values they
    have, so such a block is never taken for an exact one.
    """

    codec: str
    codec_version: int

    @property
    def exact(self) -> PortableLayout:
        """The layout of the blocks before the codec."""
        return PortableLayout(self.dtype, self.block_tokens, self.layers)


class LayoutSlice(NamedTuple):
    """A part of each block of a portable layout: heads of layers, in the order of the payload.

    `heads[layer]` are the heads of a layer, empty if the slice lacks the layer. `written` are those
    of them that this slice writes: ranks that hold copies of a head write it once.
    """

    layout: PortableLayout
    heads: tuple[range, ...]
    written: tuple[range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the slice of one block: its runs one after another, without gaps."""
        return sum(run.nbytes for run in self.runs())

    def runs(self) -> list[StateRun]:
        """Return the ranges of the payload that the slice consists of, in ascending order."""
        return list(self._runs(self.heads))

    def written_runs(self) -> list[StateRun]:
        """Return the ranges of the payload that this slice writes, in ascending order."""
        return list(self._runs(self.written))

    def _runs(self, heads: tuple[range, ...]) -> Iterator[StateRun]:
        layout, at = self.layout, 0
        for layer, (state, chosen) in enumerate(zip(layout.layers, heads, strict=True)):
            for name, size in state.states:
                head_bytes = layout.head_bytes(size)
                if chosen:
                    start = at + chosen.start * head_bytes
                    yield StateRun(layer, name, chosen, start, len(chosen) * head_bytes)
                at += state.heads * head_bytes


@prepared
class RankSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the model that an exact block holds: that of one tensor and pipeline rank."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    def __post_init__(self) -> None:
        for kind in ("tp", "pp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            _check_count(f"layout.slice.{kind}_size", size)
            if type(rank) is not int or not 0 <= rank < size:
                raise BlockError(
                    f"layout.slice.{kind}_rank is {rank!r}; with {kind}_size {size} it is from 0 "
                    f"to {size - 1}"
                )


@prepared
class ExactLayout(Layout, frozen=True, forbid_unknown_fields=True, tag="exact"):
    """Whole pages of one build of one engine, layer by layer, in the order of the tokens.

    `page_bytes` is the size of one page of one layer. A block has `layers x (block_tokens /
    page_tokens)` pages. `packing` names the order of the elements in a page, on a CPU with its
    instruction set; `backend` names the attention kernels, `device` what they run on.
    """

    layers: int
    kv_heads: int
    head_size: int
    page_tokens: int
    page_bytes: int
    packing: str
    engine: str
    engine_version: str
    backend: str
    device: str
    slice: RankSlice

    def __post_init__(self) -> None:
        for field in ("dtype", "packing", "engine", "engine_version", "backend", "device"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise BlockError(f"layout.{field} is {value!r}; it must be a text, and not empty")
        for field in (
            "layers",
            "kv_heads",
            "head_size",
            "page_tokens",
            "page_bytes",
            "block_tokens",
        ):
            _check_count(f"layout.{field}", getattr(self, field))
        if self.block_tokens % self.page_tokens:
            raise BlockError(
                f"layout.block_tokens {self.block_tokens} is not a multiple of "
                f"page_tokens {self.page_tokens}"
            )
        _check_payload(self.raw_bytes)

    @property
    def pages_per_block(self) -> int:
        """Engine pages, per layer, in one block."""
        return self.block_tokens // self.page_tokens

    @property
    def raw_bytes(self) -> int:
        return self.layers * self.pages_per_block * self.page_bytes


@prepared
class OpaqueLayout(Layout, frozen=True, forbid_unknown_fields=True, tag="opaque"):
    """The bytes that one build of one engine hands over as one piece of memory.

    `nbytes` is its length. `arrangement` is the engine's own description of what the bytes are:
    layers and their groups, heads, page sizes, packing, parallel sizes and rank, as canonical JSON.
    `layers` counts the layers of the model that keep KV state; a block may hold those of one KV
    group only, which its name then says.
    """

    layers: int
    nbytes: int
    arrangement: str
    engine: str
    engine_version: str

    def __post_init__(self) -> None:
        for field in ("dtype", "arrangement", "engine", "engine_version"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise BlockError(f"layout.{field} is {value!r}; it must be a text, and not empty")
        _check_count("layout.block_tokens", self.block_tokens)
        _check_count("layout.nbytes", self.nbytes)
        _check_layers(self.layers)
        _check_payload(self.nbytes)

    @property
    def raw_bytes(self) -> int:
        return self.nbytes


def _rank_heads(layer: int, count: int, tp_rank: int, tp_size: int) -> tuple[range, range]:
    """Return the heads of a layer that a rank holds, and those that it writes."""
    if count % tp_size == 0:
        share = count // tp_size
        heads = range(tp_rank * share, (tp_rank + 1) * share)
        return heads, heads
    if tp_size % count:
        raise BlockError(
            f"tp_size {tp_size} and the {count} heads of layer {layer}: one must be a multiple of "
            "the other"
        )
    copies = tp_size // count
    head = tp_rank // copies
    return range(head, head + 1), range(head, head + (tp_rank % copies == 0))


def _check_range(what: str, chosen: range, limit: int, has: str) -> None:
    """Raise BlockError unless a range is not empty, without steps, and from 0 to the limit."""
    if chosen.step != 1 or not 0 <= chosen.start < chosen.stop <= limit:
        raise BlockError(
            f"slice: {what} {chosen.start} to {chosen.stop} in steps of {chosen.step} requested, "
            f"but {has}; pass a range of step 1 within 0 to {limit}"
        )


def _check_count(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise BlockError(f"{what} is {value!r}; it must be a whole number of at least 1")


def _check_layers(layers: int) -> None:
    _check_count("layout.layers", layers)
    if layers > LAYERS_MAX:
        raise BlockError(f"layout.layers: {layers} layers; the limit is {LAYERS_MAX}")


def _check_payload(nbytes: int) -> None:
    if nbytes > PAYLOAD_BYTES_MAX:
        raise BlockError(
            f"layout: a block has {nbytes} bytes; the limit is {PAYLOAD_BYTES_MAX}; lower "
            "block_tokens"
        )
