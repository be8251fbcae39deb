"""Holdfast's own recorded events: a request a line, with the keys of its blocks.

    {"at_s": 12.5, "fingerprint": "9f...", "session": "a1", "tokens": 1100, "output_tokens": 80,
     "keys": ["03...", ...]}

`at_s` in seconds on any clock; `tokens` of the prompt; `keys` in hexadecimal, head first, of the
full blocks of the prompt; `session` and `output_tokens` may be left out. Keys name a fingerprint
and a whole prefix, so nothing is shared between fingerprints; they reveal no text.
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


class Line(msgspec.Struct):
    """One request."""

    at_s: Time
    fingerprint: Hex
    tokens: Tokens
    keys: list[Hex]
    session: int | str | None = None
    output_tokens: Tokens = 0


def read(source: Source, reading: Reading) -> Trace:
    """Read the file; the block size is found from lengths and keys unless it is given."""
    rows = Rows(source)
    names: dict[str, int] = {}
    for number, line in source.decoded(msgspec.json.Decoder(Line)):
        session = rows.session_of(line.session)
        rows.add(number, line.at_s, (line.tokens, line.output_tokens), session)
        rows.chain([names.setdefault(key, len(names)) for key in line.keys])
    given = reading.block_tokens
    return rows.trace(block_size.held(rows, given) if given else block_size.found(rows))
