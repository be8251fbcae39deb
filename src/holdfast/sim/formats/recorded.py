"""Holdfast's own recorded events: a request per line, with the keys of its blocks.

    {"at_s": 12.5, "fingerprint": "9f...", "session": "a1", "tokens": 1100, "output_tokens": 80,
     "keys": ["03...", ...]}

`at_s` is in seconds on any clock. `tokens` counts the prompt. `keys` are the hexadecimal keys of
the prompt's full blocks, head first. `session` and `output_tokens` are optional. A key names a
fingerprint and a whole prefix, so fingerprints share no blocks; keys do not reveal text.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.sim.formats import block_size
from holdfast.sim.formats.rows import Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

NAME = "Holdfast's recorded events"
FIELDS = frozenset({"at_s", "fingerprint", "tokens", "keys"})

Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]


class RecordedLine(msgspec.Struct):
    """One request."""

    at_s: Time
    fingerprint: Hex
    tokens: Tokens
    keys: list[Hex]
    session: int | str | None = None
    output_tokens: Tokens = 0


def read(source: Source, reading: Reading) -> Trace:
    """Read the file; a block size that is not given is inferred from lengths and keys."""
    rows = Rows(source)
    names: dict[str, int] = {}
    for number, line in source.decoded(msgspec.json.Decoder(RecordedLine)):
        session = rows.session_of(line.session)
        rows.add(number, line.at_s, (line.tokens, line.output_tokens), session)
        rows.chain([names.setdefault(key, len(names)) for key in line.keys])
    return rows.trace(block_size.find(rows, reading.block_tokens))
