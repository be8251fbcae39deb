"""Planes: every payload comes back bit for bit, floats shrink, and no stored bytes do harm."""

import contextlib
import struct
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec import planes
from holdfast.codec.planes import PIECE_BYTES, Planes
from holdfast.errors import CodecMismatchError, FormatError

CODEC = Planes()
LIBRARY_COMPRESSOR = planes.zstd.ZstdCompressor
SEED = 11


def floats(nbytes, width=2):
    """Normal values as bf16 (width 2) or float32, whose channels have different scales."""
    random = np.random.default_rng(SEED)
    values = random.normal(size=(nbytes // width + 64) // 64 * 64).astype(np.float32)
    values *= np.tile(np.exp(random.normal(size=64)).astype(np.float32), len(values) // 64)
    words = values.view(np.uint32)
    return (words if width == 4 else (words >> 16).astype(np.uint16)).tobytes()[:nbytes]


def noise(nbytes):
    return np.random.default_rng(SEED).bytes(nbytes)


def special(nbytes):
    """Bit patterns of bf16: NaN with payloads, both infinities, both zeros, subnormals."""
    patterns = [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F]
    return np.resize(np.array(patterns, "<u2"), nbytes // 2 + 1).tobytes()[:nbytes]


PAYLOADS = {"floats": floats, "noise": noise, "equal": lambda n: b"\x5a" * n, "special": special}


def encoded(raw, width=2):
    """The encoded payload; empty if the codec says that it does not pay."""
    into = memoryview(bytearray(b"\xee" * len(raw)))
    return bytes(into[: CODEC.encode(memoryview(raw), into, width)])


def decoded(stored, nbytes):
    into = memoryview(bytearray(b"\xdd" * nbytes))
    CODEC.decode(memoryview(stored), into)
    return bytes(into)


class ZstdCompressor:
    """The library's compressor, as a class that can be derived from."""

    FLUSH_FRAME = planes.zstd.ZstdCompressor.FLUSH_FRAME

    def __init__(self, options):
        self._compressor = LIBRARY_COMPRESSOR(options=options)

    def compress(self, data, mode):
        return self._compressor.compress(data, mode)


def twin(stored, nbytes):
    """Decode by the definition of the format, byte by byte of its planes."""
    width, count = struct.unpack_from("<BH", stored)
    lengths = np.frombuffer(stored, "<u4", count * width, 3).reshape(count, width)
    at, out = 3 + 4 * count * width, bytearray(nbytes)
    for piece, own in enumerate(lengths):
        start = piece * PIECE_BYTES
        elements = min(PIECE_BYTES, nbytes - start) // width
        for byte, length in enumerate(map(int, own)):
            plane = stored[at : at + (length or elements)]
            at += len(plane)
            plane = planes.zstd.decompress(plane) if length else plane
            out[start + byte : start + elements * width : width] = plane
    rest = len(stored) - at
    out[nbytes - rest :] = stored[at:]
    return bytes(out)


@pytest.mark.parametrize("width", [1, 2, 4, 3, 8, 0])
@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("nbytes", [0, 1, 7, 4_096, 100_001, PIECE_BYTES + 3, 2 * PIECE_BYTES])
def test_a_payload_comes_back_bit_for_bit_or_is_not_encoded(width, kind, nbytes):
    raw = PAYLOADS[kind](nbytes)
    stored = encoded(raw, width)
    if stored:
        assert len(stored) <= 0.95 * nbytes
        assert decoded(stored, nbytes) == raw
        assert twin(stored, nbytes) == raw


@given(
    st.binary(max_size=40), st.integers(1, 3_000), st.sampled_from([1, 2, 4]), st.binary(max_size=9)
)
def test_any_payload_comes_back(unit, times, width, rest):
    raw = unit * times + rest
    stored = encoded(raw, width)
    assert not stored or decoded(stored, len(raw)) == raw == twin(stored, len(raw))


@pytest.mark.parametrize(
    ("kind", "width", "least", "most"),
    [
        ("floats", 2, 1.35, 1.6),
        ("floats", 4, 1.1, 1.3),
        ("equal", 2, 1_000, 1e6),
        ("special", 2, 3.0, 4.0),
    ],
)
def test_payloads_shrink_as_far_as_their_entropy_permits(kind, width, least, most):
    raw = PAYLOADS[kind](PIECE_BYTES) if kind != "floats" else floats(PIECE_BYTES, width)
    assert least <= len(raw) / len(encoded(raw, width)) <= most


def test_float32_that_was_computed_in_bf16_keeps_no_empty_plane():
    bf16 = np.frombuffer(floats(PIECE_BYTES // 2), "<u2")
    raw = (bf16.astype("<u4") << 16).tobytes()
    stored = encoded(raw, 4)
    assert len(raw) / len(stored) >= 2.6
    assert decoded(stored, len(raw)) == raw


def test_a_payload_of_random_bytes_is_not_encoded():
    assert not encoded(noise(PIECE_BYTES))


def test_a_payload_that_would_not_fit_is_not_encoded():
    raw = memoryview(floats(100_000))
    stored = len(encoded(bytes(raw)))
    assert CODEC.encode(raw, memoryview(bytearray(stored)), 2) == stored
    assert CODEC.encode(raw, memoryview(bytearray(stored - 1)), 2) == 0


def test_the_golden_vector_is_decoded():
    """64 numbers of 2 bytes, 0x3f00 to 0x3f3f, and one byte that is left over."""
    frame = "28b52ffd2040450000103f3f010093001621"
    stored = bytes.fromhex("0201000000000011000000" + bytes(range(64)).hex() + frame)
    raw = np.arange(0x3F00, 0x3F40, dtype="<u2").tobytes() + b"!"
    assert decoded(stored, 129) == raw == twin(stored, 129)


def test_encoding_proves_that_the_payload_comes_back(monkeypatch):
    """A processor or memory that fails while a plane is coded must not cost the block."""

    class Flipping(ZstdCompressor):
        def compress(self, data, mode):
            return super().compress(bytes([data[0] ^ 1]) + bytes(data[1:]), mode)

    monkeypatch.setattr(planes.zstd, "ZstdCompressor", Flipping)
    raw = memoryview(floats(100_000))
    with pytest.raises(CodecMismatchError, match="stored raw"):
        Planes().encode(raw, memoryview(bytearray(len(raw))), 2)


def test_a_zstd_that_cannot_skip_the_match_search_encodes_the_same_format(monkeypatch):
    class Older(ZstdCompressor):
        def __init__(self, options):
            if set(options) - set(map(int, planes.zstd.CompressionParameter)):
                raise planes.zstd.ZstdError("invalid parameter")
            super().__init__(options)

    monkeypatch.setattr(planes.zstd, "ZstdCompressor", Older)
    raw = memoryview(floats(100_000))
    into = memoryview(bytearray(len(raw)))
    nbytes = Planes().encode(raw, into, 2)
    assert 1.35 <= len(raw) / nbytes <= 1.6
    assert decoded(into[:nbytes], len(raw)) == raw


def hostile():
    """Encoded payloads with one lie each, and the number of bytes that the reader expects."""
    nbytes = PIECE_BYTES + 4_097
    raw = floats(nbytes)
    good = encoded(raw)
    head = struct.unpack_from("<BHIIII", good)
    low, high = PIECE_BYTES // 2, head[3]
    bomb = planes.zstd.compress(bytes(1 << 26))
    frame_at = 3 + 16 + low

    def changed(at, new):
        return good[:at] + new + good[at + len(new) :]

    def lengths(*own):
        return good[:3] + struct.pack("<IIII", *own) + good[19:]

    yield "empty", b"", nbytes
    yield "truncated head", good[:2], nbytes
    yield "truncated lengths", good[:18], nbytes
    yield "truncated plane", good[:-4_000], nbytes
    yield "without the rest", good[:-1], nbytes
    yield "longer", good + b"\0", nbytes
    yield "width 0", changed(0, b"\0"), nbytes
    yield "width 3", changed(0, b"\3"), nbytes
    yield "split as 4 bytes", changed(0, b"\4"), nbytes
    yield "split as single bytes", changed(0, b"\1"), nbytes
    yield "no piece", changed(1, b"\0\0"), nbytes
    yield "more pieces than bytes", changed(1, b"\xff\xff"), nbytes
    yield "swapped lengths", lengths(head[3], head[2], *head[4:]), nbytes
    yield "a plane that is too long", lengths(0xFFFFFFFF, *head[3:]), nbytes
    yield "a raw plane called coded", lengths(low - 1, high + 1, *head[4:]), nbytes
    yield "a coded plane called raw", lengths(0, 0, *head[4:]), nbytes
    yield "swapped planes", good[:19] + good[frame_at : frame_at + high] + good[19:frame_at], nbytes
    yield "a damaged frame", changed(frame_at, b"\0\0\0\0"), nbytes
    yield "another raw length", good, nbytes - 2
    yield "a claim of 1 TB", good, 0
    yield "a bomb", good[:frame_at] + bomb.ljust(high, b"\0") + good[frame_at + high :], nbytes
    huge = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40)
    yield "a frame that claims 1 TB", changed(frame_at, huge), nbytes


@pytest.mark.parametrize(
    ("lie", "stored", "nbytes"), [pytest.param(*c, id=c[0]) for c in hostile()]
)
def test_a_lie_in_the_stored_bytes_is_an_error_and_allocates_little(lie, stored, nbytes):
    into = memoryview(bytearray(nbytes))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="planes: "):
            CODEC.decode(memoryview(stored), into)
        assert tracemalloc.get_traced_memory()[1] < 4 * PIECE_BYTES
    finally:
        tracemalloc.stop()


@given(st.data())
def test_flipped_bytes_never_do_worse_than_an_error(data):
    raw = floats(5_001)
    stored = bytearray(encoded(raw))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FormatError):
        assert len(decoded(bytes(stored), len(raw))) == len(raw)


def test_threads_share_one_codec():
    payloads = [floats(200_000 + 2 * n) for n in range(4)]
    back = {}

    def work(n):
        for _ in range(5):
            back[n] = decoded(encoded(payloads[n]), len(payloads[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [back[n] for n in range(4)] == payloads
