"""int8: half the bytes, a bounded error, the same bytes when coded again; else stored exact."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.blocks.layout import (
    ExactLayout,
    HeadState,
    LatentState,
    PortableLayout,
    RankSlice,
)
from holdfast.codec.int8 import DTYPES, Int8, coded_bytes, value_groups, why_not
from holdfast.errors import BlockError, FormatError

PREFIX_BYTES = 8


def layout_of(dtype, tokens, *layers):
    return PortableLayout(dtype, tokens, tuple(HeadState(*layer) for layer in layers))


LAYOUT = layout_of("bfloat16", 4, (2, 6, 5), (1, 6, 5), (2, 3, 7))


def values_of(layout):
    return layout.raw_bytes // layout.element_bytes


def as_bits(values, dtype):
    """The bits of float32 numbers in a dtype, rounded to nearest even."""
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":
        wide = values.view(np.uint32)
        odd = (wide >> 16) & 1
        return np.where(np.isfinite(values), (wide + 0x7FFF + odd) >> 16, wide >> 16).astype("<u2")
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16).view("<u2")
    return values.view("<u4")


def as_floats(bits, dtype):
    if dtype == "bfloat16":
        return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(bits).view(np.float16 if dtype == "float16" else np.float32)


def raw_of(values, dtype):
    return memoryview(bytearray(as_bits(values, dtype).tobytes()))


def drawn(layout, seed=0, scale=1.0):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(values_of(layout)) * scale
    return raw_of(values, layout.dtype)


def encode(layout, raw):
    """The coded form of what the codec keeps of a block; empty if it leaves the block exact."""
    raw, into = memoryview(bytearray(raw)), memoryview(bytearray(coded_bytes(layout)))
    if not Int8(layout).quantised(raw):
        return into[:0]
    assert Int8(layout).encode(raw, into, layout.element_bytes) == len(into)
    return into


def decode(stored, nbytes):
    into = memoryview(bytearray(nbytes))
    Int8().decode(stored, into)
    return into


def read(raw, layout):
    return as_floats(np.frombuffer(raw, f"<u{layout.element_bytes}"), layout.dtype)


def float32(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


def plainly_rounded(number, dtype):
    """The number in a dtype: to nearest; halves of bf16 away from zero, of fp16 to even."""
    if dtype == "float32":
        return number
    if dtype == "float16":
        return struct.unpack("<e", struct.pack("<e", number))[0]
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x8000) >> 16 << 16))[0]


def plain_groups(head, size, width, layout):
    """The places of the values of a head, from its first, that share a peak: one list a peak."""
    groups = {}
    for token in range(layout.block_tokens):
        for channel in range(size):
            name = channel if width is None else (token, channel // width)
            groups.setdefault(name, []).append(head + token * size + channel)
    return groups.values()


def plain_heads(layout):
    """(whether it holds keys, first value, size, width of a group of values) of each head."""
    at = 0
    for layer in layout.layers:
        for are_keys, size in ((True, layer.key_size), (False, layer.value_size)):
            for _ in range(layer.kv_heads):
                yield are_keys, at, size, None if are_keys else size // value_groups(size)
                at += layout.block_tokens * size


def plainly_coded(values, layout):
    """The coded block and what it decodes to, in plain Python, value by value."""
    peaks, codes = {True: [], False: []}, {True: [], False: []}
    decoded = list(values)
    for are_keys, at, size, width in plain_heads(layout):
        code_of = {}
        for members in plain_groups(at, size, width, layout):
            top = max(abs(values[m]) for m in members)
            peak = struct.unpack("<e", struct.pack("<e", top))[0]
            peaks[are_keys].append(peak)
            for m in members:
                code_of[m] = round(float32(values[m] * float32(127 / peak))) if peak else 0
                product = float32(code_of[m] * float32(peak / 127))
                decoded[m] = plainly_rounded(product, layout.dtype)
        codes[are_keys] += [code_of[m] for m in sorted(code_of)]
    number, layers = DTYPES.index(layout.dtype), len(layout.layers)
    stored = struct.pack("<BBHI", 1, number, layers, layout.block_tokens)
    for layer in layout.layers:
        stored += struct.pack("<HHH", layer.kv_heads, layer.key_size, layer.value_size)
    for each in peaks.values():
        stored += struct.pack(f"<{len(each)}e", *each)
    for each in codes.values():
        stored += struct.pack(f"<{len(each)}b", *each)
    return stored, decoded


layers = st.builds(
    HeadState, st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 7, 64, 80, 128])
)
layouts = st.builds(
    PortableLayout,
    st.sampled_from(DTYPES),
    st.integers(1, 9),
    st.lists(layers, min_size=1, max_size=3).map(tuple),
)


@given(layouts, st.integers(0, 1 << 30), st.sampled_from([1e-3, 1.0, 300.0]))
def test_the_codec_agrees_with_plain_python_byte_for_byte(layout, seed, scale):
    raw = drawn(layout, seed, scale)
    stored, decoded = plainly_coded(read(raw, layout).tolist(), layout)
    coded = encode(layout, raw)
    if coded:
        assert bytes(coded) == stored
        assert read(decode(coded, len(raw)), layout).tolist() == decoded
    else:  # a small group has a peak below the range
        assert scale < 1


@given(layouts, st.data())
def test_a_quantised_block_is_coded_without_any_further_loss(layout, data):
    """Any bits: what is not finite or out of range is left exact, the rest is a fixed point."""
    nbytes = layout.raw_bytes
    if data.draw(st.booleans()):
        raw = bytearray(np.random.default_rng(data.draw(st.integers(0, 99))).bytes(nbytes))
    else:
        exponent = data.draw(st.integers(-30, 14))
        raw = bytearray(drawn(layout, data.draw(st.integers(0, 99)), 2.0**exponent))
    before = bytes(raw)
    quantised = Int8(layout).quantised(memoryview(raw))
    coded = encode(layout, memoryview(raw))
    if quantised:
        assert bytes(decode(coded, nbytes)) == bytes(raw)
        again = bytearray(raw)
        assert Int8(layout).quantised(memoryview(again))
        assert again == raw
    else:
        assert bytes(raw) == before
        assert not coded or bytes(decode(coded, nbytes)) != before


def test_every_bfloat16_peak_in_range_is_a_fixed_point():
    """Each of the 128 significands, with codes from -127 to 127, at every exponent in range."""
    significands = np.arange(128, dtype=np.uint32)
    layout = layout_of("bfloat16", 255, (1, 128, 1))
    steps = np.arange(-127, 128, dtype=np.float32)[:, None] / 127
    for exponent in range(-17, 16):
        tops = as_floats((significands | (exponent + 127) << 7).astype("<u2"), "bfloat16")
        keys = (steps * tops).ravel()
        raw = raw_of(np.concatenate([keys, np.zeros(255, np.float32)]), "bfloat16")
        assert Int8(layout).quantised(raw), exponent
        codes = np.frombuffer(encode(layout, raw)[-values_of(layout) :], np.int8)[: 255 * 128]
        assert (codes.reshape(255, 128) == np.arange(-127, 128)[:, None]).all(), exponent


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_at_most_half_a_step_and_the_rounding_of_the_dtype(dtype):
    layout = layout_of(dtype, 32, (2, 16, 16))
    raw = drawn(layout, 3)
    exact, got = read(raw, layout).copy(), read(decode(encode(layout, raw), len(raw)), layout)
    keys, values = np.split(exact.astype(np.float64).reshape(4, 32, 16), 2)
    step = np.concatenate(
        [
            np.broadcast_to(np.abs(keys).max(1, keepdims=True), keys.shape),
            np.broadcast_to(np.abs(values).max(2, keepdims=True), values.shape),
        ]
    ).ravel()
    rounding = np.abs(exact) * 2.0**-8 + 2.0**-11
    assert (np.abs(got - exact) <= step / 254 * 1.001 + rounding).all()


def test_one_wide_channel_costs_the_other_channels_of_the_keys_nothing():
    layout = layout_of("float32", 64, (1, 8, 8))
    keys = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    values = np.zeros((64, 8), np.float32)
    errors = []
    for factor in (1, 1000):
        wide = keys.copy()
        wide[:, 3] *= factor
        raw = raw_of(np.concatenate([wide.ravel(), values.ravel()]), "float32")
        got = read(decode(encode(layout, raw), len(raw)), layout)[: 64 * 8].reshape(64, 8)
        errors.append(np.abs(got - wide)[:, [0, 1, 2, 4, 5, 6, 7]].max())
    assert errors[0] == errors[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [64, 128])
def test_a_block_of_128_tokens_takes_at_most_53_percent(dtype, size):
    layout = layout_of(dtype, 128, *[(8, size, size)] * 32)
    assert coded_bytes(layout) <= 0.53 * layout.raw_bytes


def test_the_golden_block_is_stored_as_documented():
    layout = layout_of("bfloat16", 2, (1, 2, 2))
    raw = raw_of([1.0, -2.0, 0.5, 4.0, 127.0, 1.0, 0.0, -0.25], "bfloat16")
    expected = "0100010002000000010002000200003c0044f05700347fc0407f7f010081"
    assert bytes(encode(layout, raw)).hex() == expected
    assert read(decode(encode(layout, raw), 16), layout).tolist() == [
        1.0, -2.015625, 0.50390625, 4.0, 127.0, 1.0, 0.0, -0.25,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-7, -1e-6])
def test_a_block_with_a_value_out_of_range_is_stored_exact(dtype, place, value):
    layout = layout_of(dtype, 1, (1, 1, 1))
    values = [1.0, 1.0]
    values[place] = value
    raw = raw_of(values, dtype)
    before = bytes(raw)
    assert not encode(layout, raw)
    assert not Int8(layout).quantised(raw)
    assert bytes(raw) == before


@pytest.mark.parametrize("value", [65_536.0, 1e30])
def test_a_peak_above_fp16_is_stored_exact(value):
    for dtype in ("bfloat16", "float32"):
        layout = layout_of(dtype, 1, (1, 1, 1))
        assert not encode(layout, raw_of([value, 1.0], dtype))


def test_zeros_of_both_signs_are_coded():
    raw = raw_of(np.array([0.0, -0.0] * (values_of(LAYOUT) // 2), np.float32), "bfloat16")
    assert Int8(LAYOUT).quantised(raw)
    assert bytes(raw) == bytes(LAYOUT.raw_bytes)


@pytest.mark.parametrize(
    "nbytes", [0, LAYOUT.raw_bytes - 1, LAYOUT.raw_bytes + 2, 2 * LAYOUT.raw_bytes]
)
def test_a_block_of_another_size_is_stored_exact(nbytes):
    into = memoryview(bytearray(coded_bytes(LAYOUT)))
    assert Int8(LAYOUT).encode(memoryview(bytes(nbytes)), into, 2) == 0
    assert not Int8(LAYOUT).quantised(memoryview(bytearray(nbytes)))


def test_a_block_is_stored_exact_if_there_is_no_room_for_its_coded_form():
    into = memoryview(bytearray(coded_bytes(LAYOUT) - 1))
    assert Int8(LAYOUT).encode(drawn(LAYOUT), into, 2) == 0


def test_a_codec_without_a_layout_codes_nothing():
    raw, into = drawn(LAYOUT), memoryview(bytearray(coded_bytes(LAYOUT)))
    assert Int8().encode(raw, into, 2) == 0
    assert not Int8().quantised(raw)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (layout_of("float8_e4m3fn", 1, (1, 1, 1)), "float8_e4m3fn cannot be quantised, only bfl"),
        (layout_of("int8", 1, (1, 1, 1)), "dtype int8 cannot be quantised"),
        (layout_of("bfloat16", 1, (1, 1, 1), (1 << 16, 1, 1)), "1: kv_heads is 65536, more than 6"),
        (layout_of("bfloat16", 1, (1, 1 << 16, 1)), "layer 0: key_size is 65536, more than 65535"),
        (layout_of("bfloat16", 1, (1, 1, 1 << 16)), "layer 0: value_size is 65536, more than"),
        (
            PortableLayout("bfloat16", 1, (HeadState(1, 1, 1), LatentState(8))),
            "layer 1: latents of MLA are stored exact",
        ),
        (
            ExactLayout(
                dtype="bfloat16",
                block_tokens=16,
                layers=1,
                kv_heads=1,
                head_size=1,
                page_tokens=16,
                page_bytes=64,
                packing="p",
                engine="e",
                engine_version="1",
                backend="b",
                device="d",
                slice=RankSlice(0, 1, 0, 1),
            ),
            "opaque: quantise needs the portable layout",
        ),
    ],
)
def test_a_layout_that_cannot_be_quantised_is_refused_with_a_reason(layout, message):
    assert message in why_not(layout)
    with pytest.raises(BlockError, match=message):
        Int8(layout)


@given(st.integers(0, coded_bytes(LAYOUT) - 1))
def test_every_truncated_block_is_refused(end):
    stored = encode(LAYOUT, drawn(LAYOUT))
    with pytest.raises(FormatError):
        decode(stored[:end], LAYOUT.raw_bytes)


@pytest.mark.parametrize("difference", [-2, -1, 1, 2, 1 << 20])
def test_a_block_of_another_decoded_length_is_refused(difference):
    with pytest.raises(FormatError):
        decode(encode(LAYOUT, drawn(LAYOUT)), LAYOUT.raw_bytes + difference)


def test_a_longer_block_is_refused():
    stored = bytes(encode(LAYOUT, drawn(LAYOUT))) + b"\0"
    with pytest.raises(FormatError):
        decode(memoryview(stored), LAYOUT.raw_bytes)


def test_a_block_of_another_layout_and_size_is_refused_by_a_codec_with_a_layout():
    other = layout_of(
        "bfloat16", 4, *[(s.kv_heads, s.key_size, s.value_size) for s in LAYOUT.layers[::-1]]
    )
    with pytest.raises(FormatError, match="layout"):
        Int8(LAYOUT).decode(encode(other, drawn(other)), memoryview(bytearray(LAYOUT.raw_bytes)))


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param((1, 0, 1, 0xFFFF_FFFF, 0xFFFF, 0xFFFF, 0xFFFF), id="a bomb of 2^81 bytes"),
        pytest.param((1, 0, 0xFFFF, 4, 2, 6, 5), id="more layers than bytes"),
        pytest.param((1, 0, 0, 4, 2, 6, 5), id="no layers"),
        pytest.param((1, 0, 3, 0, 2, 6, 5), id="no tokens"),
        pytest.param((1, 0, 3, 4, 0, 6, 5), id="no heads"),
        pytest.param((1, 0, 3, 4, 2, 0, 5), id="no channels"),
        pytest.param((1, 1, 3, 4, 2, 6, 6), id="another head size"),
        pytest.param((1, 2, 3, 4, 2, 6, 5), id="another dtype"),
        pytest.param((1, 3, 3, 4, 2, 6, 5), id="an unknown dtype"),
        pytest.param((2, 0, 3, 4, 2, 6, 5), id="a later version"),
    ],
)
def test_a_forged_prefix_is_refused_before_anything_is_allocated(prefix):
    stored = bytearray(encode(LAYOUT, drawn(LAYOUT)))
    stored[:14] = struct.pack("<BBHIHHH", *prefix)
    with pytest.raises(FormatError):
        decode(memoryview(stored), LAYOUT.raw_bytes)


@given(st.integers(0, coded_bytes(LAYOUT) * 8 - 1), st.sampled_from(DTYPES))
def test_a_flipped_bit_is_refused_or_decoded_without_an_error(bit, dtype):
    layout = PortableLayout(dtype, 4, LAYOUT.layers)
    stored = bytearray(encode(layout, drawn(layout)))
    stored[bit // 8] ^= 1 << bit % 8
    try:
        decode(memoryview(stored), layout.raw_bytes)
    except FormatError:
        assert bit < 8 * (PREFIX_BYTES + 6 * len(layout.layers))


@given(st.binary(max_size=200), st.integers(0, 4096))
def test_noise_is_refused(noise, nbytes):
    with pytest.raises(FormatError):
        decode(memoryview(noise), nbytes)
