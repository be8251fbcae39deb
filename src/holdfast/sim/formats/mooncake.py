"""Mooncake JSONL: a request a line with `timestamp` in ms, lengths and `hash_ids`.

As published with "Mooncake: A KVCache-centric Disaggregated Architecture" (FAST'25), 512 tokens a
block; others use the form with other block sizes and add a `session_id`. Ids are hashes of whole
prefixes. `timestamp` may be only an order, 1 ms apart.
"""

from __future__ import annotations

import msgspec

from holdfast.sim.formats import block_size
from holdfast.sim.formats.rows import Id, Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

NAME = "Mooncake JSONL"
FIELDS = frozenset({"timestamp", "input_length", "hash_ids"})


class Line(msgspec.Struct):
    """One request."""

    timestamp: Time
    input_length: Tokens
    hash_ids: list[Id]
    output_length: Tokens = 0
    session_id: int | str | None = None


def read(source: Source, reading: Reading) -> Trace:
    """Read the file; the block size is found from lengths and ids unless it is given."""
    rows = Rows(source)
    for number, line in source.decoded(msgspec.json.Decoder(Line)):
        session = rows.session_of(line.session_id)
        rows.add(number, line.timestamp / 1e3, (line.input_length, line.output_length), session)
        rows.chain(line.hash_ids)
    given = reading.block_tokens
    return rows.trace(block_size.held(rows, given) if given else block_size.found(rows))
