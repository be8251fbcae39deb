"""Gate records: the criterion; a forged record, or one of something else, permits nothing."""

import math

import msgspec
import pytest

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import Layout
from holdfast.codec.gate import (
    Difference,
    GateRecord,
    objections,
    read_gate_record,
    signed,
    why_refused,
    write_gate_record,
)
from holdfast.errors import FormatError

SECRET = bytes(range(32))
LAYOUT = Layout.portable(layers=2, kv_heads=2, head_size=8, dtype="bfloat16", block_tokens=128)
CONTROL = Difference(
    kl=1e-4, kl_p99=1e-3, same_top=0.99, nats_lost=0.0, score=0.5, score_error=0.01
)


def blocks_of(model="m", layout=LAYOUT, codec=("int8", 1)):
    """The fingerprint of coded blocks."""
    exact = Fingerprint.portable(
        layout, model=model, positions="p", adapter="none", kv_quantisation="none", kv_scales="none"
    )
    return exact.quantised(*codec)


BLOCKS = blocks_of()


def record(**changes):
    made = GateRecord(
        fingerprint=BLOCKS.digest().hex(),
        codec="int8",
        version=1,
        layout=LAYOUT,
        model="m",
        engine="transformers 5.0, bfloat16 on cpu",
        control="float32",
        prompts=64,
        coded_tokens=512,
        judged_tokens=128,
        exact_blocks=0.0,
        control_difference=CONTROL,
        coded_difference=CONTROL,
        made="2026-11-27T12:00:00+00:00",
    )
    return msgspec.structs.replace(made, **changes)


def coded(**changes):
    return record(coded_difference=msgspec.structs.replace(CONTROL, **changes))


def refused(found, *, secret=SECRET, blocks=BLOCKS):
    return why_refused(found, secret, blocks)


def test_a_signed_record_that_passes_permits_the_codec():
    assert refused(signed(record(), SECRET)) == ""
    assert refused(read_gate_record(write_gate_record(signed(record(), SECRET)))) == ""


@pytest.mark.parametrize(
    "found",
    [
        coded(kl=2e-4, kl_p99=2e-3, same_top=0.985),
        coded(kl=0.0, kl_p99=0.0, same_top=1.0, nats_lost=-1.0),
        coded(nats_lost=1.0),
        coded(score=0.49),
        coded(score=0.9, score_error=0.5),
    ],
)
def test_a_record_within_the_bounds_passes(found):
    assert objections(found) == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (coded(kl=2.01e-4), "KL is 0.000201, more than 2 times the control's 0.0001"),
        (coded(kl_p99=2.01e-3), "KL p99 is 0.00201, more than 2 times the control's 0.001"),
        (coded(same_top=0.984), "the top token is the same at 98.40% of positions, less than"),
        (coded(kl=math.nan), "KL is nan"),
        (coded(kl_p99=math.inf), "KL p99 is inf"),
        (coded(same_top=math.nan), "the top token is the same at nan%"),
        (
            coded(score=0.4899),
            "48.99% of the text's tokens are predicted, and 50.00% from exact blocks",
        ),
        (coded(score=math.nan), "nan% of the text's tokens are predicted"),
        (record(prompts=63), "prompts is 63, fewer than 64"),
        (record(coded_tokens=511), "coded tokens is 511, fewer than 512"),
        (record(judged_tokens=127), "judged tokens is 127, fewer than 128"),
    ],
)
def test_a_record_outside_the_bounds_does_not_pass_and_says_why(found, reason):
    assert reason in "; ".join(objections(found))
    assert reason in refused(signed(found, SECRET))


@pytest.mark.parametrize("name", GateRecord.__struct_fields__)
def test_a_record_with_any_field_changed_after_signing_is_refused(name):
    other = {
        "layout": msgspec.structs.replace(LAYOUT, block_tokens=64),
        "control_difference": msgspec.structs.replace(CONTROL, kl=1.0),
        "coded_difference": msgspec.structs.replace(CONTROL, kl=0.0),
    }
    before = getattr(record(), name)
    changed = other[name] if name in other else before + ("0" if isinstance(before, str) else 1)
    forged = msgspec.structs.replace(signed(record(), SECRET), **{name: changed})
    assert refused(forged) == "it was not made with this domain's secret, or was changed"


def test_a_record_without_a_code_or_of_another_domain_is_refused():
    reason = "it was not made with this domain's secret, or was changed"
    assert refused(record()) == reason
    assert refused(signed(record(), bytes(32))) == reason
    assert refused(msgspec.structs.replace(record(), mac="é")) == reason


OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, block_tokens=64)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (blocks_of("another"), f"it is of fingerprint {BLOCKS.digest().hex()}"),
        (blocks_of(codec=("int8", 2)), "it is of fingerprint"),
        (blocks_of(layout=OTHER_LAYOUT), "it is of fingerprint"),
    ],
)
def test_a_record_of_another_fingerprint_is_refused(blocks, reason):
    assert reason in refused(signed(record(), SECRET), blocks=blocks)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "it is of codec int8 version 2, not int8 1"),
        ({"codec": "int4"}, "it is of codec int4 version 1, not int8 1"),
        ({"layout": OTHER_LAYOUT}, "of another layout"),
        ({"model": "another"}, "the judged model is 'another', and the blocks are of 'm'"),
        ({"model": ""}, "the judged model is '', and the blocks are of 'm'"),
    ],
)
def test_a_record_that_judged_something_else_is_refused(changes, reason):
    assert reason in refused(signed(record(**changes), SECRET))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        write_gate_record(record(format=2)),
        write_gate_record(record()).replace(b'"prompts": 64', b'"prompts": "64"'),
        write_gate_record(record()).replace(b'"prompts"', b'"prompt"'),
        write_gate_record(record()).replace(b'"block_tokens": 128', b'"block_tokens": 0'),
    ],
)
def test_a_file_that_is_no_record_is_refused(data):
    with pytest.raises(FormatError, match="gate record"):
        read_gate_record(data)
