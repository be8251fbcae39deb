"""Qwen-Bailian JSONL: a request per line with `chat_id` and `parent_chat_id`, 16-token blocks.

Published with "KVCache Cache in the Wild" (ATC'25), `timestamp` in seconds. A request whose parent
is known belongs to its parent's session. Ids are hashes of single blocks, so `sim.trace` chains
them: the same id after another prefix is another block.
"""

from __future__ import annotations

import msgspec

from holdfast.sim.formats import block_size
from holdfast.sim.formats.rows import Id, Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

NAME = "Qwen-Bailian JSONL"
FIELDS = frozenset({"chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids"})
BLOCK_TOKENS = 16


class BailianLine(msgspec.Struct):
    """One request; `turn` and `type` are not used."""

    chat_id: int
    parent_chat_id: int
    timestamp: Time
    input_length: Tokens
    hash_ids: list[Id]
    output_length: Tokens = 0


def read(source: Source, reading: Reading) -> Trace:
    """Read the file."""
    rows = Rows(source)
    sessions: dict[int, int] = {}
    for number, line in source.decoded(msgspec.json.Decoder(BailianLine)):
        session = sessions.get(line.parent_chat_id)
        if session is None:
            session = rows.session_of(line.chat_id)
        sessions[line.chat_id] = session
        rows.add(number, line.timestamp, (line.input_length, line.output_length), session)
        rows.chain(line.hash_ids)
    return rows.trace(block_size.check(rows, reading.block_tokens or BLOCK_TOKENS))
