"""Measure a codec beside a plain copy and other compressors, on keys and values of a trained model.

Speeds are bytes of raw payload per second of this thread's processor time, so that they count one
core whatever else the machine does. Encoding includes the proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module, resources
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES, Header
from holdfast.blocks.layout import Layout
from holdfast.buffers import align_up, aligned_buffer
from holdfast.codec.codec import codec_named
from holdfast.codec.coded import decode_record, encode_record
from holdfast.codec.int8 import Int8
from holdfast.codec.pack import pack, payload
from holdfast.errors import Outcome
from holdfast.report import Row, at_least, at_most, not_measured
from holdfast_bench.harness.hardware_limits import GB

SAMPLE_SHAPE = (3, 2, 2, 256, 64)
"""Shape of the sample: layer, keys and values, KV head, token, dimension; bf16."""

BLOCK_BYTES = 8 << 20

INT8_LAYOUT = Layout.portable(
    layers=16, kv_heads=8, head_size=128, dtype="bfloat16", block_tokens=128
)
"""A block of 8 MiB, as half of Llama-3.1-8B's."""

INT8_STORED_GOAL = 0.53
RATIO_GOAL, ENCODE_GOAL, DECODE_GOAL = 1.45, 1.0, 2.5
"""Least ratio on keys and on values, and least GB/s of a core."""

_ROW_BYTES = 128
_LOW_BITS = 0x1F
_SEED = 5


class Pipeline(NamedTuple):
    """A compressor of whole payloads: `encode` returns what `decode` turns back into bytes."""

    encode: Callable[[memoryview], Any]
    decode: Callable[[Any], Any]


@cache
def sample() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the bits of a trained model's keys and values, in the shape `SAMPLE_SHAPE`."""
    data = (resources.files("holdfast_bench") / "data" / "kv_sample.bin").read_bytes()
    return np.frombuffer(data, "<u2").reshape(SAMPLE_SHAPE)


def block(nbytes: int, part: int | None = None) -> memoryview:
    """Return a payload of trained KV in aligned memory: keys (0), values (1), or both (None).

    It has the sample's vectors of 64 values in random order, with random low bits of the mantissa,
    so that a search for matches does not find the copies.
    """
    taken = sample() if part is None else sample()[:, part]
    vectors = np.ascontiguousarray(taken).reshape(-1, _ROW_BYTES // 2)
    random = np.random.default_rng(_SEED)
    order = random.permutation(np.arange(nbytes // _ROW_BYTES) % len(vectors))
    into = aligned_buffer(nbytes)
    values = np.frombuffer(into, np.uint16).reshape(-1, _ROW_BYTES // 2)
    values[:] = vectors[order]
    values ^= random.integers(0, _LOW_BITS + 1, values.shape, np.uint16)
    return into


def codec_rows(rounds: int) -> Iterator[Row]:
    """Yield the ratio of `planes` on keys and on values, and its speeds."""
    for part, name in enumerate(("keys", "values")):
        raw = block(BLOCK_BYTES, part)
        stored = codec_named("planes").encode(raw, aligned_buffer(len(raw)), 2)
        yield at_least(f"codec.ratio.{name}", len(raw) / stored, "x", RATIO_GOAL)
    raw = block(BLOCK_BYTES)
    copy_gb_per_s = copy_speed(raw, rounds)
    for kind, goal, speed in zip(
        ("encode", "decode"),
        (ENCODE_GOAL, DECODE_GOAL),
        _speeds(planes_pipeline(len(raw)), raw, rounds)[1:],
        strict=True,
    ):
        yield Row(
            what=f"codec.{kind}",
            value=speed,
            unit="GB/s",
            limit=copy_gb_per_s,
            goal=goal,
            ok=speed >= goal,
            more={"limit_is": "a copy"},
        )
    _, encode, decode = _speeds(record_pipeline(len(raw)), raw, rounds)
    yield Row(what="codec.record.encode", value=encode, unit="GB/s")
    yield Row(what="codec.record.decode", value=decode, unit="GB/s")
    yield from int8_rows(rounds, copy_gb_per_s)


def int8_rows(rounds: int, copy_gb_per_s: float) -> Iterator[Row]:
    """Yield the stored share and the speeds of `int8`.

    `quantise` changes the values of a new block, with the proof; `encode` codes such a block on its
    way to a tier, with the proof; `decode` is its way back.
    """
    codec, raw = Int8(INT8_LAYOUT), aligned_buffer(INT8_LAYOUT.payload_bytes)
    raw[:] = block(len(raw))
    stored, back = aligned_buffer(len(raw)), aligned_buffer(len(raw))
    quantise = _gb_per_cpu_s(len(raw), lambda: codec.quantised(raw), rounds)
    size = codec.encode(raw, stored, 2)
    yield at_most("codec.int8.stored", size / len(raw), "of raw", INT8_STORED_GOAL)
    speeds = {
        "quantise": quantise,
        "encode": _gb_per_cpu_s(len(raw), lambda: codec.encode(raw, stored, 2), rounds),
        "decode": _gb_per_cpu_s(len(raw), lambda: codec.decode(stored[:size], back), rounds),
    }
    if bytes(back) != bytes(raw):
        raise RuntimeError("a quantised block does not decode to the same bytes")
    for name, value in speeds.items():
        more: dict[str, object] = {"limit_is": "a copy"}
        what = f"codec.int8.{name}"
        yield Row(what=what, value=value, unit="GB/s", limit=copy_gb_per_s, more=more)


def other_rows(rounds: int) -> Iterator[Row]:
    """Yield ratio and speeds of the other compressors; one row for each that is not installed."""
    raw = block(BLOCK_BYTES)
    for name, make in OTHERS.items():
        try:
            pipeline = make()
        except ImportError as error:
            yield not_measured(f"codec.{name}", f"{error.name or error} is not installed here")
            continue
        ratio, encode, decode = _speeds(pipeline, raw, rounds)
        yield Row(what=f"codec.{name}.ratio", value=ratio, unit="x")
        yield Row(what=f"codec.{name}.encode", value=encode, unit="GB/s")
        yield Row(what=f"codec.{name}.decode", value=decode, unit="GB/s")


def planes_pipeline(nbytes: int) -> Pipeline:
    """Return the codec `planes` over payloads of bf16, with buffers of its own."""
    codec, stored, back = codec_named("planes"), aligned_buffer(nbytes), aligned_buffer(nbytes)

    def encode(raw: memoryview) -> memoryview:
        return stored[: codec.encode(raw, stored, 2)]

    def decode(code: memoryview) -> memoryview:
        codec.decode(code, back)
        return back

    return Pipeline(encode, decode)


def record_pipeline(nbytes: int) -> Pipeline:
    """Return `planes` over whole records of bf16: their checksums are verified and written, too."""
    size = align_up(HEADER_BYTES + nbytes + TAG_BYTES)
    record, stored, back = aligned_buffer(size), aligned_buffer(size), aligned_buffer(size)
    payload(record, nbytes)[:] = block(nbytes)
    name = bytes(16)
    header = Header(
        name, name, name, name, depth=0, tokens=1, payload_bytes=nbytes, raw_bytes=nbytes
    )
    pack(record, header)

    def encode(_raw: memoryview) -> memoryview:
        return stored[: encode_record(record, codec_named("planes"), stored, 2)]

    def decode(code: memoryview) -> memoryview:
        if decode_record(code, back) is not Outcome.OK:
            raise RuntimeError("an encoded record does not decode")
        return payload(back, nbytes)

    return Pipeline(encode, decode)


def copy_speed(raw: memoryview, rounds: int) -> float:
    """Return the speed of a plain copy of a payload in GB/s of processor time."""
    into = np.frombuffer(aligned_buffer(len(raw)), np.uint8)
    source = np.frombuffer(raw, np.uint8)
    return _gb_per_cpu_s(len(raw), lambda: np.copyto(into, source), rounds)


def _speeds(pipeline: Pipeline, raw: memoryview, rounds: int) -> tuple[float, float, float]:
    """Return ratio, encode speed and decode speed; raise RuntimeError if a byte differs."""
    code = pipeline.encode(raw)
    if bytes(pipeline.decode(code)) != bytes(raw):
        raise RuntimeError("a compressor does not return what it was given")
    encode = _gb_per_cpu_s(len(raw), lambda: pipeline.encode(raw), rounds)
    decode = _gb_per_cpu_s(len(raw), lambda: pipeline.decode(code), rounds)
    return len(raw) / len(code), encode, decode


def _gb_per_cpu_s(nbytes: int, work: Callable[[], object], rounds: int) -> float:
    """Return the median over rounds of GB per second of this thread's processor time."""
    work()
    speeds = []
    for _ in range(rounds):
        start_s = time.thread_time()
        work()
        speeds.append(nbytes / max(time.thread_time() - start_s, 1e-9) / GB)
    return median(speeds)


def _zstd() -> Pipeline:
    library = import_module("compression.zstd" if _in_standard_library() else "backports.zstd")
    return Pipeline(lambda raw: library.compress(raw, 1), library.decompress)


def _in_standard_library() -> bool:
    try:
        import_module("compression.zstd")
    except ImportError:
        return False
    return True


def _lz4() -> Pipeline:
    library = import_module("lz4.frame")
    return Pipeline(library.compress, library.decompress)


def _blosc2() -> Pipeline:
    library = import_module("blosc2")
    options = {
        "typesize": 2,
        "codec": library.Codec.ZSTD,
        "clevel": 1,
        "filters": [library.Filter.SHUFFLE],
        "nthreads": 1,
    }
    return Pipeline(
        lambda raw: library.compress2(bytes(raw), **options),
        lambda code: library.decompress2(code, nthreads=1),
    )


def _zipnn() -> Pipeline:
    library = import_module("zipnn")
    coder = library.ZipNN(method="HUFFMAN", bytearray_dtype="bfloat16", threads=1)
    return Pipeline(lambda raw: coder.compress(bytearray(raw)), coder.decompress)


OTHERS: dict[str, Callable[[], Pipeline]] = {
    "zstd": _zstd,
    "lz4": _lz4,
    "blosc2": _blosc2,
    "zipnn": _zipnn,
}
"""Other compressors by name; a maker raises ImportError if its package is not installed."""
