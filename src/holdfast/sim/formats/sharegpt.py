"""ShareGPT-like JSON: conversations as text, in one list or one per line.

Each is `{"conversations": [{"from": "human", "value": "..."}, ...]}`. Every answer becomes a
request whose prompt is all the text before it. Tokens are estimated as UTF-8 bytes / 4; a block id
is a hash of the text up to the end of the block's `4 * block_tokens` bytes. The format has no
times, so only the order is meaningful: conversation after conversation. The text is not kept.
"""

from __future__ import annotations

import msgspec

from holdfast.sim.formats.rows import BLOCK_TOKENS, Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.formats.texts import extend_chain
from holdfast.sim.trace import Trace

TOKEN_BYTES = 4
_PROMPT_ROLES = {"human", "user", "system", "tool"}


class ChatTurn(msgspec.Struct):
    """One message of a conversation."""

    role: str = msgspec.field(name="from")
    value: str


class Conversation(msgspec.Struct):
    """One conversation."""

    conversations: list[ChatTurn]


def read(source: Source, reading: Reading) -> Trace:
    """Read the file."""
    size = reading.block_tokens or BLOCK_TOKENS
    block_bytes = size * TOKEN_BYTES
    rows = Rows(source, reading)
    conversations = source.decoded(msgspec.json.Decoder(Conversation))
    for session, (number, conversation) in enumerate(conversations):
        prompt = bytearray()
        ids: list[int] = []
        for turn in conversation.conversations:
            message = f"{turn.role}: {turn.value}\n".encode(errors="replace")
            if turn.role not in _PROMPT_ROLES and prompt:
                extend_chain(ids, prompt, block_bytes)
                tokens = -(-len(prompt) // TOKEN_BYTES), -(-len(message) // TOKEN_BYTES)
                rows.add(number, None, tokens, session)
                rows.chain(ids)
            prompt += message
    return rows.trace(size)
