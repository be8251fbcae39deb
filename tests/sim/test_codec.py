"""Modelled tiers with a codec: more blocks in the same bytes, and reads that decoders bound."""

import math

import pytest

from holdfast.sim.codec import RAW, tier_encoding
from holdfast.sim.hardware import resolve
from holdfast.sim.ladder import parse_ladder
from holdfast.sim.model.catalogue import load_model
from holdfast.sim.profile import load_profile

PROFILE = load_profile()
RATIO = PROFILE.codec.ratio.mid
DECODED = PROFILE.codec.decode_bytes_per_s.mid * PROFILE.codec.decode_threads.mid


def ladder(**disk):
    tiers = [
        {"kind": "host", "capacity": "64 GiB"},
        {"kind": "disk", "capacity": "1 TiB", "read_bytes_per_s": 2e9, **disk},
        {"kind": "object", "read_bytes_per_s": 1e9, "worker_bytes_per_s": 5e8},
    ]
    engine = {"prefill": {"a": 0.01, "b": 1e-4, "c": 0}}
    return parse_ladder({"tiers": tiers, "engine": engine, "token_bytes": 1e5})


def specs(model: str | None = "Llama-3.1-8B", **disk):
    shape = load_model(model) if model else None
    return resolve(ladder(**disk), PROFILE, 128, shape).tier_specs


@pytest.mark.parametrize(
    ("kind", "dtype", "rate", "mode", "encodes"),
    [
        ("disk", "bf16", 2e9, "auto", True),
        ("disk", "fp16", 2e9, "auto", False),
        ("object", "bf16", 1e8, "auto", True),
        ("disk", "bf16", 40e9, "auto", False),
        ("disk", "bf16", 40e9, "planes", True),
        ("disk", "bf16", 2e9, "off", False),
        ("disk", "fp8", 2e9, "auto", False),
        ("disk", "", 2e9, "auto", False),
        ("disk", "", 2e9, "planes", True),
        ("host", "bf16", 2e9, "planes", False),
        ("cxl", "bf16", 2e9, "auto", False),
    ],
)
def test_a_tier_encodes_as_a_node_would(kind, dtype, rate, mode, encodes):
    encoding = tier_encoding(PROFILE, kind, dtype, rate, mode)
    assert (encoding is not RAW) is encodes
    assert encoding.ratio == (RATIO if encodes else 1.0)


def test_an_encoding_disk_holds_more_blocks_in_the_same_bytes_and_delivers_them_sooner():
    host, disk, shared = specs()
    raw_host, raw_disk, _ = specs(codec="off")
    assert (host.blocks, host.ratio) == (raw_host.blocks, 1.0)
    assert disk.blocks == pytest.approx(raw_disk.blocks * RATIO, rel=1e-4)
    assert disk.nbytes == pytest.approx(raw_disk.nbytes, rel=1e-4)
    assert disk.read_bytes_per_s == pytest.approx(2e9 * RATIO)
    assert shared.model.worker_bytes_per_s == pytest.approx(5e8 * RATIO)


def test_the_decoders_bound_what_a_fast_tier_delivers():
    _, disk, _ = specs(read_bytes_per_s=2 * DECODED, codec="planes")
    assert disk.read_bytes_per_s == DECODED
    _, raw, _ = specs(read_bytes_per_s=2 * DECODED)
    assert (raw.read_bytes_per_s, raw.ratio) == (2 * DECODED, 1.0)


def test_a_limit_of_one_request_does_not_slow_the_disk_for_others():
    _, disk, _ = specs(read_bytes_per_s=4e9, request_bytes_per_s=1e9)
    assert disk.read_bytes_per_s == pytest.approx(4e9 * RATIO)
    assert disk.model.request_bytes_per_s == pytest.approx(1e9 * RATIO)


def test_without_a_model_the_type_is_unknown_and_records_count_raw():
    assert [spec.ratio for spec in specs(model=None)] == [1.0, 1.0, 1.0]


def test_raw_tiers_are_not_bounded_by_decoders():
    assert RAW.delivered(1e15) == 1e15
    assert RAW.decode_bytes_per_s == math.inf
