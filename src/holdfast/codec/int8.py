"""The lossy codec `int8`: keys and values as 8-bit codes with fp16 peaks; half the bytes; pure.

It codes blocks in the portable layout, whose keys and values, heads and channels it can tell apart:
keys have one peak per layer, head and channel, over the block's tokens; values one per layer, token
and head (per 64 channels if the head is wider). A *peak* is the largest magnitude of its group of
values; a value is `code x peak / 127`, rounded to the block's dtype. Keys need a peak per channel
because models have a few channels that are much wider than the others (KIVI, arXiv 2402.02750).

Stored: a prefix (version, dtype, shape), all peaks of the keys, all peaks of the values, all codes
of the keys, all codes of the values. Exact bytes: docs/reference/format.md.

`quantised` replaces a block by what the codec keeps of it. After that the codec is exact: coding
the result and decoding it gives the same bytes, which `quantised` checks. So a block is quantised
once, before it is published, and every tier gives the same values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks.layout import HeadState, Layout, PortableLayout
from holdfast.errors import BlockError, FormatError

if TYPE_CHECKING:
    import numpy.typing as npt

    Bits: TypeAlias = npt.NDArray[np.unsignedinteger]
    Floats: TypeAlias = npt.NDArray[np.float32]
    Codes: TypeAlias = npt.NDArray[np.int8]
    Peaks: TypeAlias = npt.NDArray[np.float16]

NAME = "int8"
NUMBER = 2
"""The codec's number in a record's header."""

VERSION = 1
"""Version of the arithmetic and the format; it is part of the fingerprint and of gate records."""

CODE_MAX = 127
PEAK_MIN = 2.0**-17
"""Smallest nonzero peak. Below it fp16 has fewer than bf16's 8 significant bits."""
PEAK_MAX = 65_504.0
"""Largest finite number of fp16."""
VALUE_GROUP, VALUE_GROUP_MIN = 64, 16
"""Channels of a value's head that share a peak, at most and at least, if they divide it evenly."""

NO_LATENTS = "latents of MLA are stored exact, because what int8 does to them was not measured"

_PIECE_VALUES = 1 << 16
"""Values that are coded at once: their float32 fill a quarter of a megabyte."""

_UINT16 = 0xFFFF
_PREFIX = struct.Struct("<BBHI")
_LAYER = struct.Struct("<HHH")


class _Dtype(NamedTuple):
    """A dtype: its number in stored blocks, unsigned type, all bits but the sign, infinity."""

    number: int
    bits: np.dtype[np.unsignedinteger]
    magnitude: int
    infinity: int


_DTYPES = {
    "bfloat16": _Dtype(0, np.dtype("<u2"), 0x7FFF, 0x7F80),
    "float16": _Dtype(1, np.dtype("<u2"), 0x7FFF, 0x7C00),
    "float32": _Dtype(2, np.dtype("<u4"), 0x7FFF_FFFF, 0x7F80_0000),
}
_NAMES = {dtype.number: name for name, dtype in _DTYPES.items()}

DTYPES = tuple(_DTYPES)
"""The dtypes that the codec takes; narrower ones are quantised already."""


class _Head(NamedTuple):
    """One head of a block's keys or values: tokens, and channels in groups that share a peak.

    `axis` is the one that a peak covers, of [head, token, group, channel].
    """

    tokens: int
    groups: int
    width: int
    axis: int

    @property
    def values(self) -> int:
        """Elements of the head."""
        return self.tokens * self.groups * self.width

    @property
    def peaks(self) -> int:
        """Peaks of the head."""
        return self.width if self.axis == _TOKEN else self.tokens * self.groups


_TOKEN, _CHANNEL = 1, 3


def _heads(layout: PortableLayout) -> Iterator[tuple[int, _Head, bool]]:
    """Yield (number of heads, head, whether these are keys), in the order of the payload."""
    tokens = layout.block_tokens
    for layer in layout.layers:
        if not isinstance(layer, HeadState):
            raise BlockError(NO_LATENTS)
        yield layer.kv_heads, _Head(tokens, 1, layer.key_size, _TOKEN), True
        groups = value_groups(layer.value_size)
        width = layer.value_size // groups
        yield layer.kv_heads, _Head(tokens, groups, width, _CHANNEL), False


class _Sizes(NamedTuple):
    """Numbers of values and peaks of a block's keys and values, and the bytes that they take."""

    key_peaks: int
    value_peaks: int
    keys: int
    values: int
    start: int

    @property
    def coded_bytes(self) -> int:
        """Bytes of a coded block."""
        return self.start + 2 * (self.key_peaks + self.value_peaks) + self.keys + self.values


@lru_cache(maxsize=64)
def _sizes(layout: PortableLayout) -> _Sizes:
    peaks, values = [0, 0], [0, 0]
    for count, head, are_keys in _heads(layout):
        peaks[not are_keys] += count * head.peaks
        values[not are_keys] += count * head.values
    start = _PREFIX.size + len(layout.layers) * _LAYER.size
    return _Sizes(peaks[0], peaks[1], values[0], values[1], start)


def coded_bytes(layout: PortableLayout) -> int:
    """Return the bytes of a coded block."""
    return _sizes(layout).coded_bytes


def value_groups(size: int) -> int:
    """Return the number of peaks of a value's head: groups of equal size, at most `VALUE_GROUP`.

    A head whose size has no such divisor has one peak.
    """
    for groups in range(-(-size // VALUE_GROUP), size // VALUE_GROUP_MIN + 1):
        if size % groups == 0:
            return groups
    return 1


def why_not(layout: Layout) -> str:
    """Return why blocks of a layout cannot be quantised; empty if they can."""
    if not isinstance(layout, PortableLayout):
        return "pages of an engine are opaque: quantise needs the portable layout"
    if layout.dtype not in _DTYPES:
        return f"dtype {layout.dtype} cannot be quantised, only {', '.join(DTYPES)}"
    for number, layer in enumerate(layout.layers):
        if not isinstance(layer, HeadState):
            return f"layer {number}: {NO_LATENTS}"
        for name in layer.__struct_fields__:
            if (size := getattr(layer, name)) > _UINT16:
                return f"layer {number}: {name} is {size}, more than {_UINT16}"
    return ""


class Int8:
    """The codec for blocks of one layout; without a layout it only decodes.

    Raises BlockError for a layout that cannot be quantised.
    """

    number = NUMBER
    name = NAME

    def __init__(self, layout: PortableLayout | None = None) -> None:
        if layout is not None and (why := why_not(layout)):
            raise BlockError(f"int8: {why}")
        self._layout = layout

    def encode(
        self,
        raw: memoryview,
        into: memoryview,
        element_bytes: int,  # noqa: ARG002  # the layout says it
    ) -> int:
        """Write the coded block into `into`; return its bytes, or 0 if it must be stored exact.

        That is a block that `quantised` left exact, that was not quantised, or that is not of this
        codec's layout: what is written decodes to `raw`, which is checked.
        """
        layout = self._layout
        if layout is None or len(raw) != layout.raw_bytes:
            return 0
        nbytes = coded_bytes(layout)
        if nbytes > len(into):
            return 0
        coded = into[:nbytes]
        _write_prefix(layout, coded)
        arithmetic = _Arithmetic(layout.dtype)
        for piece in _pieces(layout, raw, coded):
            if not (arithmetic.encode(piece) and arithmetic.restores(piece)):
                return 0
        return nbytes

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Decode into exactly the block's bytes; raise FormatError for lengths that do not fit."""
        layout = read_prefix(stored)
        if layout.raw_bytes != len(into) or coded_bytes(layout) != len(stored):
            raise FormatError(
                f"int8: a block of {layout.raw_bytes} bytes in {coded_bytes(layout)}; "
                f"expected {len(into)} in {len(stored)}"
            )
        if self._layout is not None and layout != self._layout:
            raise FormatError(f"int8: the block is of layout {layout}, not {self._layout}")
        arithmetic = _Arithmetic(layout.dtype)
        for piece in _pieces(layout, into, stored):
            arithmetic.decode(piece)

    def quantised(self, raw: memoryview) -> bool:
        """Replace a block by the values that the codec keeps of it; False leaves it exact.

        After True, coding and decoding the block gives the same bytes, which was checked.
        """
        layout = self._layout
        if layout is None or len(raw) != layout.raw_bytes:
            return False
        coded = np.empty(coded_bytes(layout), np.uint8).data
        values = np.empty(len(raw), np.uint8).data
        arithmetic = _Arithmetic(layout.dtype)
        for exact, piece in zip(
            _pieces(layout, raw, coded), _pieces(layout, values, coded), strict=True
        ):
            if not arithmetic.encode(exact):
                return False
            arithmetic.decode(piece)
            if not arithmetic.keeps(piece):
                return False
        raw[:] = values
        return True


def read_prefix(stored: memoryview) -> PortableLayout:
    """Return the layout in front of a coded block; raise FormatError if there is none.

    It says nothing about the lengths that follow: compare them with those that the layout implies
    before anything is allocated.
    """
    if len(stored) < _PREFIX.size:
        raise FormatError(f"int8: {len(stored)} bytes are too short for a coded block")
    version, number, count, tokens = _PREFIX.unpack_from(stored)
    if version != VERSION or number not in _NAMES:
        raise FormatError(
            f"int8: version {version} with dtype {number} is unknown; this build reads version "
            f"{VERSION}"
        )
    end = _PREFIX.size + count * _LAYER.size
    if len(stored) < end:
        raise FormatError(f"int8: {len(stored)} bytes are too short for {count} layers")
    try:
        layers = (HeadState(*sizes) for sizes in _LAYER.iter_unpack(stored[_PREFIX.size : end]))
        return PortableLayout(_NAMES[number], tokens, tuple(layers))
    except BlockError as error:
        raise FormatError(f"int8: {error}") from error


class _Piece(NamedTuple):
    """Keys or values of some heads of a layer: bits and codes [head, token, group, channel], peaks.

    `peaks` has the shape of the codes with `axis` reduced to 1. Keys have one group.
    """

    bits: Bits
    codes: Codes
    peaks: Peaks
    axis: int


def _pieces(layout: PortableLayout, raw: memoryview, stored: memoryview) -> Iterator[_Piece]:
    """Yield views of a block and its coded form, in the order of the block.

    Pieces have about `_PIECE_VALUES` values, so that what is computed of one stays in the
    processor's cache.
    """
    sizes = _sizes(layout)
    bits = np.frombuffer(raw, _DTYPES[layout.dtype].bits)
    peaks = np.frombuffer(stored, "<f2", sizes.key_peaks + sizes.value_peaks, sizes.start)
    codes = np.frombuffer(stored, np.int8, offset=sizes.start + peaks.nbytes)
    keys = _Cursor(peaks[: sizes.key_peaks], codes[: sizes.keys])
    values = _Cursor(peaks[sizes.key_peaks :], codes[sizes.keys :])
    at = 0
    for heads, head, are_keys in _heads(layout):
        cursor = keys if are_keys else values
        most = max(1, _PIECE_VALUES // head.values)
        for first in range(0, heads, most):
            count = min(most, heads - first)
            size = count * head.values
            yield cursor.take(count, head, bits[at : at + size])
            at += size


class _Cursor:
    """The rest of the peaks and codes of all keys, or of all values."""

    def __init__(self, peaks: Peaks, codes: Codes) -> None:
        self._peaks, self._codes = peaks, codes

    def take(self, count: int, head: _Head, bits: Bits) -> _Piece:
        """Return the piece of the next heads."""
        full = (count, head.tokens, head.groups, head.width)
        few = tuple(1 if n == head.axis else size for n, size in enumerate(full))
        number = count * head.peaks
        peaks, self._peaks = self._peaks[:number], self._peaks[number:]
        codes, self._codes = self._codes[: bits.size], self._codes[bits.size :]
        return _Piece(bits.reshape(full), codes.reshape(full), peaks.reshape(few), head.axis)


class _Arithmetic:
    """The arithmetic of one dtype, piece by piece, in memory that the pieces share."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._type = _DTYPES[dtype]
        self._floats: Floats = np.empty(0, np.float32)
        self._magnitudes: Bits = np.empty(0, self._type.bits)

    def encode(self, piece: _Piece) -> bool:
        """Write codes and peaks of a piece; False if it must be stored exact."""
        tops = self._tops(piece)
        if tops.max() >= self._type.infinity:
            return False
        tops_as_floats = np.empty(tops.shape, np.float32)
        self._read(tops, tops_as_floats)
        with np.errstate(over="ignore", under="ignore"):
            piece.peaks[...] = tops_as_floats
        peaks = piece.peaks.astype(np.float32)
        if peaks.max() > PEAK_MAX or ((tops_as_floats > 0) & (peaks < PEAK_MIN)).any():
            return False
        np.copyto(piece.codes, self._rounded(piece, peaks), casting="unsafe")
        return True

    def decode(self, piece: _Piece) -> None:
        """Write the bits of a piece from its codes and peaks."""
        floats = self._scratch(piece)
        np.copyto(floats, piece.codes)
        with np.errstate(invalid="ignore", over="ignore"):  # a forged record has any peaks
            floats *= piece.peaks.astype(np.float32) / np.float32(CODE_MAX)
            self._write(floats, piece.bits)

    def restores(self, piece: _Piece) -> bool:
        """Return whether the codes of a piece decode to its bits."""
        bits = np.empty(piece.bits.shape, piece.bits.dtype)
        self.decode(piece._replace(bits=bits))
        return bool((bits == piece.bits).all())

    def keeps(self, piece: _Piece) -> bool:
        """Return whether a decoded piece would be coded as it was: same peaks, same codes."""
        tops = np.empty(piece.peaks.shape, np.float32)
        self._read(self._tops(piece), tops)
        if (tops.astype(np.float16) != piece.peaks).any():
            return False
        peaks = piece.peaks.astype(np.float32)
        return bool((self._rounded(piece, peaks) == piece.codes).all())

    def _tops(self, piece: _Piece) -> Bits:
        """Return the largest magnitude of each group: they are in the order of their bits."""
        if self._magnitudes.size < piece.bits.size:
            self._magnitudes = np.empty(piece.bits.size, self._type.bits)
        magnitudes = self._magnitudes[: piece.bits.size].reshape(piece.bits.shape)
        np.bitwise_and(piece.bits, self._type.bits.type(self._type.magnitude), out=magnitudes)
        tops: Bits = magnitudes.max(piece.axis, keepdims=True)
        return tops

    def _rounded(self, piece: _Piece, peaks: Floats) -> Floats:
        """Return the codes of a piece as integral float32, in this object's memory."""
        floats = self._scratch(piece)
        self._read(piece.bits, floats)
        factors = np.zeros_like(peaks)
        np.divide(np.float32(CODE_MAX), peaks, out=factors, where=peaks > 0)
        floats *= factors
        return np.rint(floats, out=floats)

    def _scratch(self, piece: _Piece) -> Floats:
        if self._floats.size < piece.bits.size:
            self._floats = np.empty(piece.bits.size, np.float32)
        return self._floats[: piece.bits.size].reshape(piece.bits.shape)

    def _read(self, bits: Bits, into: Floats) -> None:
        """Write the numbers of these bits."""
        if self._dtype == "bfloat16":
            wide = into.view(np.uint32)
            np.copyto(wide, bits)
            wide <<= 16
        else:
            np.copyto(into, bits.view(np.float16 if self._dtype == "float16" else np.float32))

    def _write(self, floats: Floats, into: Bits) -> None:
        """Write bits of the numbers, rounded to nearest, of bf16 halves away from 0; uses them."""
        if self._dtype == "bfloat16":
            wide = floats.view(np.uint32)
            wide += 0x8000
            wide >>= 16
            np.copyto(into, wide, casting="unsafe")
        elif self._dtype == "float16":
            into.view(np.float16)[...] = floats
        else:
            into.view(np.float32)[...] = floats


def _write_prefix(layout: PortableLayout, into: memoryview) -> None:
    number, layers = _DTYPES[layout.dtype].number, len(layout.layers)
    _PREFIX.pack_into(into, 0, VERSION, number, layers, layout.block_tokens)
    at = _PREFIX.size
    for layer in layout.layers:
        if isinstance(layer, HeadState):
            _LAYER.pack_into(into, at, layer.kv_heads, layer.key_size, layer.value_size)
        at += _LAYER.size
