"""Mooncake JSONL: a request per line with `timestamp` in ms, lengths and `hash_ids`.

Published with "Mooncake: A KVCache-centric Disaggregated Architecture" (FAST'25), with 512-token
blocks. Other publishers use the format with other block sizes and add a `session_id`. Ids are
hashes of whole prefixes. Time stamps 1 ms apart may express the order only.
"""

from __future__ import annotations

import msgspec

from holdfast.sim.formats import block_size
from holdfast.sim.formats.rows import Id, Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

NAME = "Mooncake JSONL"
FIELDS = frozenset({"timestamp", "input_length", "hash_ids"})


class MooncakeLine(msgspec.Struct):
    """One request."""

    timestamp: Time
    input_length: Tokens
    hash_ids: list[Id]
    output_length: Tokens = 0
    session_id: int | str | None = None


def read(source: Source, reading: Reading) -> Trace:
    """Read the file; a block size that is not given is inferred from lengths and ids."""
    rows = Rows(source)
    for number, line in source.decoded(msgspec.json.Decoder(MooncakeLine)):
        session = rows.session_of(line.session_id)
        rows.add(number, line.timestamp / 1e3, (line.input_length, line.output_length), session)
        rows.chain(line.hash_ids)
    return rows.trace(block_size.find(rows, reading.block_tokens))
