"""Write gate records that permit a codec, for tests of stores that quantise."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.blocks.fingerprint import Fingerprint
from holdfast.blocks.layout import QuantisedLayout
from holdfast.codec.gate import Difference, GateRecord, gate_file, signed, write_gate_record
from holdfast.codec.int8 import NAME, VERSION
from holdfast.errors import BlockError

_NOISE = Difference(kl=1e-4, kl_p99=1e-3, same_top=0.99, nats_lost=0.0, score=0.5, score_error=0.01)


def passing_record(fingerprint: Fingerprint) -> GateRecord:
    """Return a record that permits `int8` for blocks with this fingerprint, not signed yet.

    `fingerprint`: that of the exact blocks.
    """
    quantised = fingerprint.quantised(NAME, VERSION)
    layout = quantised.representation
    if not isinstance(layout, QuantisedLayout):
        raise BlockError(f"a record of {layout}, which is not quantised")
    return GateRecord(
        fingerprint=quantised.digest().hex(),
        codec=NAME,
        version=VERSION,
        layout=layout.exact,
        model=quantised.meaning.model,
        engine="a test",
        control="float32",
        prompts=64,
        coded_tokens=512,
        judged_tokens=128,
        exact_blocks=0.0,
        control_difference=_NOISE,
        coded_difference=_NOISE,
        made="2026-01-01T00:00:00+00:00",
    )


def permit(folder: Path, domain_key: bytes, fingerprint: Fingerprint, **changes: object) -> Path:
    """Write a signed record that permits `int8`, with other values of some fields, if given."""
    folder.mkdir(parents=True, exist_ok=True)
    record = msgspec.structs.replace(passing_record(fingerprint), **changes)
    file = gate_file(folder, record.fingerprint)
    file.write_bytes(write_gate_record(signed(record, domain_key)))
    return file
