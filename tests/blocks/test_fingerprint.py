"""The fingerprint: every field counts, none may be missing, and its bytes never change."""

import hashlib
import json

import msgspec
import pytest

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import WHOLE, ExactLayout, HeadState, Layout
from holdfast.errors import BlockError

LAYOUT = Layout.portable(layers=2, kv_heads=4, head_size=8, dtype="bfloat16", block_tokens=16)
EXACT = ExactLayout(
    dtype="bfloat16",
    block_tokens=16,
    arrangement="opaque",
    layers=2,
    kv_heads=4,
    head_size=8,
    page_tokens=16,
    page_bytes=2048,
    slice=WHOLE,
)
FINGERPRINT = Fingerprint(
    model="sha256:00", layout=LAYOUT, positions="{}", adapter="none", kv_quantisation="none"
)


def test_the_digest_matches_the_golden_vector():
    assert FINGERPRINT.digest().hex() == "861e705ce1506372d9c0e59ecf989183"


def test_the_digest_is_as_documented():
    text = json.dumps(
        msgspec.to_builtins(FINGERPRINT), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"holdfast-fprint").digest()
    assert FINGERPRINT.digest() == digest


def mutations():
    for field in ("model", "positions", "adapter", "kv_quantisation", "naming"):
        yield field, msgspec.structs.replace(FINGERPRINT, **{field: "other"})
    yield "format", msgspec.structs.replace(FINGERPRINT, format=2)
    layers = {
        "layers": LAYOUT.layers[:1],
        "kv_heads": (HeadState(5, 8, 8),) * 2,
        "key_size": (HeadState(4, 9, 8),) * 2,
        "value_size": (HeadState(4, 8, 9),) * 2,
        "order": (HeadState(4, 8, 8), HeadState(4, 9, 8)),
    }
    for name, changed in layers.items():
        yield name, with_layout(LAYOUT, layers=changed)
    yield "block_tokens", with_layout(LAYOUT, block_tokens=32)
    yield "dtype", with_layout(LAYOUT, dtype="float16")
    yield "exact", with_layout(EXACT)
    for field in ("layers", "kv_heads", "head_size", "page_bytes"):
        yield f"exact.{field}", with_layout(EXACT, **{field: getattr(EXACT, field) + 1})
    for field, value in (("page_tokens", 8), ("block_tokens", 32)):
        yield f"exact.{field}", with_layout(EXACT, **{field: value})
    for field in ("arrangement", "dtype"):
        yield f"exact.{field}", with_layout(EXACT, **{field: "other"})
    for field in ("tp_rank", "tp_size", "pp_rank", "pp_size", "group"):
        part = msgspec.structs.replace(EXACT.slice, **{field: 7})
        yield f"exact.slice.{field}", with_layout(EXACT, slice=part)


def with_layout(layout, **changes):
    changed = msgspec.structs.replace(layout, **changes)
    return msgspec.structs.replace(FINGERPRINT, layout=changed)


def test_every_field_changes_the_digest():
    digests = {name: fingerprint.digest() for name, fingerprint in mutations()}
    digests["as it is"] = FINGERPRINT.digest()
    assert len(digests) == 28
    assert len(set(digests.values())) == 28


@pytest.mark.parametrize("field", ["model", "layout", "positions", "adapter", "kv_quantisation"])
def test_a_missing_field_is_refused_by_name(field):
    fields = msgspec.to_builtins(FINGERPRINT)
    del fields[field]
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(fields, Fingerprint)


@pytest.mark.parametrize("field", ["model", "positions", "adapter", "kv_quantisation", "naming"])
def test_an_empty_field_is_refused_by_name(field):
    with pytest.raises(BlockError, match=f"fingerprint.{field} is empty"):
        msgspec.structs.replace(FINGERPRINT, **{field: ""})


def test_an_unknown_field_is_refused_by_name():
    fields = msgspec.to_builtins(FINGERPRINT) | {"colour": "blue"}
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.convert(fields, Fingerprint)


def test_a_fingerprint_survives_conversion_to_plain_data():
    assert msgspec.convert(msgspec.to_builtins(FINGERPRINT), Fingerprint) == FINGERPRINT
