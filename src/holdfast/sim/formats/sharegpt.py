"""ShareGPT-like JSON: conversations as text, one list of them or one a line.

Each is `{"conversations": [{"from": "human", "value": "..."}, ...]}`. Every answer is a request
with all the text before it. Tokens are estimated as UTF-8 bytes / 4, and blocks are hashes of the
text of `4 * block_tokens` bytes. There are no times: requests come a second apart, conversation
after conversation, so only their order means anything. The text itself is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import msgspec

from holdfast.sim.formats.arrivals import BLOCK_TOKENS
from holdfast.sim.formats.rows import Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

NAME = "ShareGPT-like JSON"
FIELDS = frozenset({"conversations", "from", "value"})
TOKEN_BYTES = 4
_ASKING = {"human", "user", "system", "tool"}


class Turn(msgspec.Struct):
    """What one side said."""

    by: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct):
    """One conversation."""

    conversations: list[Turn]


def read(source: Source, reading: Reading) -> Trace:
    """Read the file; a list is held in memory as a whole."""
    size = reading.block_tokens or BLOCK_TOKENS
    rows = Rows(source)
    for session, (number, conversation) in enumerate(_conversations(source)):
        said = bytearray()
        ids: list[int] = []
        for turn in conversation.conversations:
            text = f"{turn.by}: {turn.value}\n".encode(errors="replace")
            if turn.by not in _ASKING and said:
                _name(said, ids, size * TOKEN_BYTES)
                tokens = -(-len(said) // TOKEN_BYTES), -(-len(text) // TOKEN_BYTES)
                rows.add(number, float(len(rows.lines)), tokens, session)
                rows.chain(ids)
            said += text
    return rows.trace(size)


def _conversations(source: Source) -> Iterator[tuple[int, Conversation]]:
    """Each conversation, with the line that it starts on where there is one a line."""
    lines = source.lines()
    number, first = next(lines, (0, b""))
    if first.lstrip()[:1] == b"[":
        whole = source.decode(msgspec.json.Decoder(list[Conversation]), source.whole(), number)
        for conversation in whole:
            yield number, conversation
    else:
        yield from source.decoded(msgspec.json.Decoder(Conversation))


def _name(said: bytearray, ids: list[int], size: int) -> None:
    """Name the full blocks of the text that have no id yet, each by all the text up to its end."""
    for end in range((len(ids) + 1) * size, len(said) + 1, size):
        before = ids[-1].to_bytes(8, "little", signed=True) if ids else b""
        digest = blake2b(before + said[end - size : end], digest_size=8).digest()
        ids.append(int.from_bytes(digest, "little", signed=True))
