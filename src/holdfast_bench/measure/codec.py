"""Measure a codec beside a plain copy and other compressors, on keys and values of a trained model.

Speeds are bytes of raw payload per second of this process's processor time, so that they count one
core whatever else the machine does, and threads of a compressor's own. Encoding includes the proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from holdfast.blocks.envelope import HEADER_BYTES, TAG_BYTES, Header
from holdfast.blocks.layout import Layout
from holdfast.buffers import align_up, aligned_buffer
from holdfast.byte_size import Size
from holdfast.codec.codec import CodecMode, codec_named
from holdfast.codec.coded import decode_record, encode_record
from holdfast.codec.int8 import Int8
from holdfast.codec.pack import pack, payload
from holdfast.errors import Outcome
from holdfast.limits import GIB
from holdfast.membership.members import Member
from holdfast.policy.leaf import LeafLru
from holdfast.report import Row, at_least, at_most, not_measured
from holdfast.store.options import StoreOptions, TierRules
from holdfast.store.store import Store
from holdfast.tiers.base import Tier
from holdfast.tiers.cxl.kind import CxlOptions
from holdfast.tiers.cxl.tier import CxlTier
from holdfast.tiers.disk.file import DiskConfig
from holdfast.tiers.disk.tier import DiskTier
from holdfast.tiers.kind import RecordTierSection, built_in_kind
from holdfast.tiers.pool.tier import PoolTier, PoolTierOptions
from holdfast.wire.remote.client import TargetClient
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.harness.paired_runs import PairedSpeeds, paired, speed_row
from holdfast_bench.harness.pool import ManualMembers
from holdfast_bench.measure.disk import (
    BATCH,
    FETCH_S,
    NAMESPACE,
    PAYLOAD_BYTES,
    SECRET,
    SEED_OFFSET,
    BenchedStore,
)
from holdfast_bench.measure.pool import TargetUnderTest

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

DISK_GB_PER_S, DISK_GOAL = 1.0, 1.3
"""Read limit of a disk, and the least GB/s of blocks that it must deliver; also its least ratio."""

WRITE_GOAL = 0.8
"""Least speed of writes of encoded records, as a share of the slower of encoding and raw writes: of
eight groups of a batch, nothing is written beside the first."""

AUTO_GOAL = 0.97
"""Least speed of a fetch, as a share of that of raw records."""

_ROW_BYTES = 128
_LOW_BITS = 0x1F
_SEED = 5
_CONTEXTS = 7

_CHOICES = 2
"""Times that contexts are saved and fetched first: raw, then as the rates say."""


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
    codec, raw = Int8(INT8_LAYOUT), aligned_buffer(INT8_LAYOUT.raw_bytes)
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


def disk_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield fetches from and writes to a disk that reads 1 GB/s, and what it holds."""

    def disk(name: str) -> DiskTier:
        path, rate = str(folder / name), DISK_GB_PER_S * GB
        return DiskTier(DiskConfig(path=path, capacity_bytes=GIB, read_bytes_per_s=rate))

    with _store(disk("encoded"), "planes") as encoded, _store(disk("plain"), "off") as plain:
        found = _fetches(encoded, plain, rounds)
        [codec] = encoded.status().codecs
        write = _write_row(encoded, plain, rounds)
    yield Row(
        what="codec.disk.fetch",
        value=found.ours.gb_per_s,
        unit="GB/s",
        limit=found.limit_gb_per_s,
        goal=DISK_GOAL,
        ok=found.ours.gb_per_s >= DISK_GOAL,
        more={"limit_is": "raw records"},
    )
    yield at_least("codec.disk.held", codec.held_ratio, "x", DISK_GOAL)
    yield write


def _write_row(encoded: Store, plain: Store, rounds: int) -> Row:
    """Compare writes of encoded records with the slower of encoding them and of raw writes.

    Groups of a batch are encoded while others are written, so the slower of both sets the pace; raw
    writes move more bytes, so this limit is no lower than the true one.
    """
    content = block(PAYLOAD_BYTES)
    encode = _speeds(record_pipeline(PAYLOAD_BYTES), content, rounds)[1]
    sides = [BenchedStore(store, 3 * SEED_OFFSET, content) for store in (encoded, plain)]
    found = paired(rounds, sides[0].write, lambda: sides[1].write().gb_per_s)
    limit = min(encode, found.limit_gb_per_s)
    ratio = found.ours.gb_per_s / limit
    return Row(
        what="codec.disk.write",
        value=found.ours.gb_per_s,
        unit="GB/s",
        limit=limit,
        ratio=ratio,
        goal=WRITE_GOAL,
        ok=ratio >= WRITE_GOAL,
        more={"limit_is": "the slower of encoding on a core and of raw writes"},
    )


def auto_rows(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield fetches from tiers that are as fast as this machine is, `auto` beside raw records.

    `encodes` is the choice that the tier made from its first reads. The goal is a share of the
    speed of raw records: the choice must not slow a fetch.
    """

    def disk(name: str) -> DiskTier:
        return DiskTier(DiskConfig(path=str(folder / name), capacity_bytes=GIB))

    def cxl(_name: str) -> CxlTier:
        return CxlTier(CxlOptions(capacity=Size(GIB)))

    with TargetUnderTest(folder) as target:

        def pool(_name: str) -> PoolTier:
            members = ManualMembers([Member(id="target", address=target.peer_address)])
            options = PoolTierOptions(deadline_s=FETCH_S)  # a call that is late is measured, too
            return PoolTier(members, lambda member: TargetClient(member.address), options)

        kinds: dict[str, Callable[[str], Tier]] = {"cxl": cxl, "disk": disk, "pool": pool}
        for kind, make in kinds.items():
            has_codec = issubclass(built_in_kind(kind).options, RecordTierSection)
            mode: CodecMode = "auto" if has_codec else "off"
            with _store(make("auto"), mode) as auto, _store(make("raw"), "off") as plain:
                found = _fetches(auto, plain, rounds)
                [codec] = auto.status().codecs
            yield speed_row(
                f"codec.auto.{kind}",
                found,
                AUTO_GOAL,
                limit_is="raw records",
                encodes=codec.encodes,
                tier_gb_per_s=codec.read_bytes_per_s / GB,
                decode_gb_per_s=codec.decode_bytes_per_s * codec.threads / GB,
            )


def _fetches(ours: Store, plain: Store, rounds: int) -> PairedSpeeds:
    """Fetch contexts from two stores in turns, once `ours` has compared raw and encoded records.

    `plain` saves and fetches the same before: a disk that was overwritten reads more slowly.
    """
    content = block(PAYLOAD_BYTES)
    sides = BenchedStore(ours, content=content), BenchedStore(plain, SEED_OFFSET, content)
    for _ in range(_CHOICES):
        for side in sides:
            side.hold(_CONTEXTS)
            for _ in range(3 * _CONTEXTS):
                side.fetch()
    for side in sides:
        side.hold(_CONTEXTS)
    return paired(rounds, sides[0].fetch, lambda: sides[1].fetch().gb_per_s)


@contextmanager
def _store(tier: Tier, mode: CodecMode) -> Iterator[Store]:
    """Open a store over one tier, whose blocks are of bf16.

    By LRU, contexts that are fetched in a cycle and do not fit in memory are never found there.
    """
    options = StoreOptions(make_eviction=LeafLru, rules={1: TierRules(codec=mode)})
    with Store(4 * BATCH * PAYLOAD_BYTES, [tier], {"bench": SECRET}, options) as store:
        store.note_element_bytes(NAMESPACE, 2)
        store.start()
        yield store


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
    """Return the median over rounds of GB per second of this process's processor time."""
    work()
    speeds = []
    for _ in range(rounds):
        start_s = time.process_time()
        work()
        speeds.append(nbytes / max(time.process_time() - start_s, 1e-9) / GB)
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
