"""The codec `planes`: bytes sorted by significance into planes, each coded by zstd or raw.

KV values have random mantissas and few different exponents. So the plane of the high bytes shrinks
to about a third, and the other planes do not shrink. zstd (RFC 8878) runs without match search,
because exponents have no repeats that are worth a match: it is a Huffman coder then.

    | width u8 | pieces u16 | stored lengths u32, pieces x width; 0: raw | planes | rest |

A piece is 1 MiB of payload, so that its planes stay in the processor's cache. The rest is what a
payload has behind its last whole element. Exact bytes: docs/reference/format.md.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import CodecMismatchError, FormatError

if TYPE_CHECKING or sys.version_info < (3, 14):
    from backports import zstd
else:
    from compression import zstd

PIECE_BYTES = 1 << 20
"""Bytes of payload whose planes are coded together; all pieces but the last have this length."""

WIDTHS = (1, 2, 4)
"""Widths in bytes of elements that are split into planes; others count as single bytes."""

RECORD_SAVING, PLANE_SAVING = 0.05, 0.02
"""Least shares that coding must save: of a payload, else it is not encoded; of a plane, else it is
raw."""

_HEAD = struct.Struct("<BH")
_PIECES_MAX = 0xFFFF
_LENGTH = np.dtype("<u4")
_ELEMENTS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SAMPLES, _SAMPLE_BYTES = 4, 4096
_SAMPLE_SAVING = 0.015
"""Least share that coding must save of a sample; it is below `PLANE_SAVING`, because a sample may
be unlike its plane."""

_WINDOW_LOG = 20
_OPTIONS = {
    int(zstd.CompressionParameter.compression_level): 1,
    int(zstd.CompressionParameter.strategy): int(zstd.Strategy.fast),
    int(zstd.CompressionParameter.min_match): 7,
    int(zstd.CompressionParameter.hash_log): 6,
    int(zstd.CompressionParameter.content_size_flag): 1,
    int(zstd.CompressionParameter.checksum_flag): 0,
}

_LITERAL_COMPRESSION_MODE, _ENABLE = 1002, 1
"""`ZSTD_c_literalCompressionMode` of zstd.h, which Python does not name. zstd codes no literals in
the strategy `fast` with a target length, unless this enables it."""

_SKIPPING = {
    int(zstd.CompressionParameter.target_length): 1 << 17,
    _LITERAL_COMPRESSION_MODE: _ENABLE,
}
"""Steps of 128 KiB, the longest, between the places at which zstd searches a match. With them it
encodes 1.3 to 1.5 times as fast, to the same size."""

_LIMITS = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}

_Array = NDArray[Any]


class _Piece(NamedTuple):
    """The stored planes of one piece, least significant byte first, and their place in the payload.

    `lengths` are those in the head; `at` is the first byte of the first plane in the stored
    payload; `elements` counts the elements from `start` bytes of the raw payload on.
    """

    start: int
    elements: int
    at: int
    lengths: list[int]


def _compressor() -> zstd.ZstdCompressor:
    """Return a compressor without match search, or with little of it if zstd has no such mode."""
    try:
        return zstd.ZstdCompressor(options=_OPTIONS | _SKIPPING)
    except (zstd.ZstdError, ValueError):
        return zstd.ZstdCompressor(options=_OPTIONS)


class _Buffers(threading.local):
    """A compressor and buffers of one thread, each of the length of a piece: no call makes them."""

    def __init__(self) -> None:
        self.compressor = _compressor()
        self.planes = np.empty(PIECE_BYTES, np.uint8)
        self.shifted = np.empty(PIECE_BYTES, np.uint8)


class Planes:
    """The codec. Each thread that uses it keeps 3 MiB."""

    number = 1
    name = "planes"

    def __init__(self) -> None:
        self._buffers = _Buffers()

    def encode(self, raw: memoryview, into: memoryview, element_bytes: int) -> int:
        """See `Codec.encode`."""
        width = element_bytes if element_bytes in WIDTHS else 1
        source, target = _array(raw), _array(into)
        limit = min(len(into), int(len(raw) * (1 - RECORD_SAVING)))
        counts = _piece_elements(len(raw), width)
        at = _HEAD.size + _LENGTH.itemsize * width * len(counts)
        if len(counts) > _PIECES_MAX or at > limit:
            return 0
        lengths: list[int] = []
        for index, elements in enumerate(counts):
            start = index * PIECE_BYTES
            piece = source[start : start + elements * width]
            own, first = [], at
            for byte, plane in enumerate(self._split(piece, width)):
                coded = None if _is_random(plane, byte, width) else self._coded(plane)
                own.append(0 if coded is None else len(coded))
                stored = plane if coded is None else coded
                if at + len(stored) > limit:
                    return 0
                target[at : at + len(stored)] = stored
                at += len(stored)
            self._prove(piece, target, _Piece(start, elements, first, own))
            lengths += own
        rest = len(raw) - len(raw) // width * width
        if at + rest > limit:
            return 0
        target[at : at + rest] = source[len(raw) - rest :]
        _HEAD.pack_into(into, 0, width, len(counts))
        into[_HEAD.size : _HEAD.size + _LENGTH.itemsize * len(lengths)] = np.array(
            lengths, _LENGTH
        ).tobytes()
        return at + rest

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """See `Codec.decode`."""
        source, target = _array(stored), _array(into)
        width, pieces, rest_at = _read_head(stored, len(into))
        for piece in pieces:
            end = piece.start + piece.elements * width
            _join(source, piece, target[piece.start : end])
        target[len(into) - (len(stored) - rest_at) :] = source[rest_at:]

    def _split(self, piece: _Array, width: int) -> Iterator[_Array]:
        """Yield the planes of a piece, the least significant byte first.

        Whole-array shifts and casts are vectorized; strided copies of bytes are six times slower.
        """
        if width == 1:
            yield piece
            return
        elements = piece.view(_ELEMENTS[width])
        shifted = self._buffers.shifted.view(_ELEMENTS[width])[: len(elements)]
        plane = self._buffers.planes[: len(elements)]
        for byte in range(width):
            source = elements if byte == 0 else np.right_shift(elements, 8 * byte, out=shifted)
            np.copyto(plane, source, casting="unsafe")
            yield plane

    def _coded(self, plane: _Array) -> _Array | None:
        """Return the zstd frame of a plane; None if coding it does not pay."""
        compressor = self._buffers.compressor
        frame = compressor.compress(plane.data, zstd.ZstdCompressor.FLUSH_FRAME)
        return _array(frame) if len(frame) <= len(plane) * (1 - PLANE_SAVING) else None

    def _prove(self, raw: _Array, stored: _Array, piece: _Piece) -> None:
        """Decode a stored piece and compare it; raise CodecMismatchError if a byte differs."""
        decoded = self._buffers.shifted[: len(raw)]
        try:
            _join(stored, piece, decoded)
            equal = np.array_equal(_words(decoded), _words(raw))
        except FormatError:
            equal = False
        if not equal:
            raise CodecMismatchError(
                f"planes: {len(raw)} bytes from {piece.start} on decode to other bytes; the block "
                "is stored raw. Test the memory of this machine"
            )


def _is_random(plane: _Array, byte: int, width: int) -> bool:
    """Return whether a sample of a long plane has too much entropy to shrink.

    The plane of the high bytes has the exponents, so it is not sampled.
    """
    if (width > 1 and byte == width - 1) or len(plane) < 4 * _SAMPLES * _SAMPLE_BYTES:
        return False
    step = len(plane) // _SAMPLES
    sample = plane[: step * _SAMPLES].reshape(_SAMPLES, step)[:, :_SAMPLE_BYTES].ravel()
    counts = np.bincount(sample)
    counts = counts[counts > 0].astype(np.float64)
    entropy_bits = np.log2(len(sample)) - float(counts @ np.log2(counts)) / len(sample)
    return bool(entropy_bits > 8 * (1 - _SAMPLE_SAVING))


def _join(source: _Array, piece: _Piece, into: _Array) -> None:
    """Write the elements of a piece from its planes, as sums of powers of 256."""
    width, ends = len(piece.lengths), piece.at
    planes = []
    for length in piece.lengths:
        ends += length or piece.elements
        stored = source[ends - (length or piece.elements) : ends]
        planes.append(_decoded(stored, piece.elements) if length else stored)
    out = into.view(_ELEMENTS[width])
    np.copyto(out, planes[-1])
    for plane in reversed(planes[:-1]):
        np.multiply(out, 256, out=out)
        np.add(out, plane, out=out)


def _decoded(frame: _Array, nbytes: int) -> _Array:
    """Return the plane of a zstd frame; raise FormatError if it has another length."""
    try:
        declared = zstd.get_frame_info(frame.data).decompressed_size
        if declared != nbytes:
            raise FormatError(f"planes: a frame of {declared} bytes in place of {nbytes}")
        decoder = zstd.ZstdDecompressor(options=_LIMITS)
        plane = decoder.decompress(frame.data, max_length=nbytes)
    except zstd.ZstdError as error:
        raise FormatError(f"planes: {error}") from error
    if len(plane) != nbytes or not decoder.eof or decoder.unused_data:
        raise FormatError(f"planes: a frame has {len(plane)} bytes, not {nbytes}, or more follows")
    return _array(plane)


def _read_head(stored: memoryview, raw_bytes: int) -> tuple[int, list[_Piece], int]:
    """Return width, pieces and the place of the rest; raise FormatError if lengths disagree."""
    if len(stored) < _HEAD.size:
        raise FormatError(f"planes: {len(stored)} bytes, fewer than {_HEAD.size}")
    width, count = _HEAD.unpack_from(stored)
    if width not in WIDTHS:
        raise FormatError(f"planes: elements of {width} bytes; this build reads {WIDTHS}")
    counts = _piece_elements(raw_bytes, width)
    at = _HEAD.size + _LENGTH.itemsize * width * count
    if count != len(counts) or len(stored) < at:
        raise FormatError(
            f"planes: {count} pieces in {len(stored)} bytes for a payload of {raw_bytes} bytes, "
            f"which has {len(counts)}"
        )
    lengths = np.frombuffer(stored[_HEAD.size : at], _LENGTH).reshape(count, width).tolist()
    pieces = []
    for index, (elements, own) in enumerate(zip(counts, lengths, strict=True)):
        if max(own) >= max(elements, 1):
            raise FormatError(f"planes: a plane of {elements} bytes is stored in {max(own)}")
        pieces.append(_Piece(index * PIECE_BYTES, elements, at, own))
        at += sum(length or elements for length in own)
    if at + raw_bytes % width != len(stored):
        raise FormatError(
            f"planes: the lengths need {at + raw_bytes % width} bytes, of {len(stored)}"
        )
    return width, pieces, at


def _piece_elements(raw_bytes: int, width: int) -> list[int]:
    """Return the number of whole elements in each piece of a payload."""
    whole, last = divmod(raw_bytes, PIECE_BYTES)
    return [PIECE_BYTES // width] * whole + ([last // width] if last or not whole else [])


def _array(view: memoryview | bytes) -> _Array:
    return np.frombuffer(view, np.uint8)


def _words(data: _Array) -> _Array:
    """Return bytes as 8-byte words if the length permits it, because they compare faster."""
    return data.view(np.uint64) if len(data) % 8 == 0 else data
