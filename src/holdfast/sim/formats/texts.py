"""Traces of requests with the text or tokens of their prompts, which become hashes of blocks.

Tokens are counted by the source of the log, and blocks are cut from its bytes: a block has the mean
number of bytes that `block_tokens` tokens have in the whole log. The text is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from holdfast.sim.formats.lengths import with_made_up_ids
from holdfast.sim.formats.rows import BLOCK_TOKENS, Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace


class LoggedRequest(NamedTuple):
    """One request of a log."""

    line: int
    at_s: float | None
    tokens: tuple[int, int]
    """Tokens of the prompt and of the answer."""
    prompt: bytes | None
    """The text of the whole prompt, or its tokens, four bytes each; None if the log has neither."""
    session: str | None = None
    model: str | None = None
    ended_s: float = math.nan
    """When the answer ended."""


def extend_chain(ids: list[int], content: bytes | bytearray, block_bytes: int) -> None:
    """Add the ids of the complete blocks of `content` after those that `ids` already has.

    An id is a hash of the id before it and of the block, so it names the whole prefix.
    """
    for end in range((len(ids) + 1) * block_bytes, len(content) + 1, block_bytes):
        before = ids[-1].to_bytes(8, "little", signed=True) if ids else b""
        digest = blake2b(before + content[end - block_bytes : end], digest_size=8).digest()
        ids.append(int.from_bytes(digest, "little", signed=True))


def read_requests(
    rows: Rows,
    reading: Reading,
    requests: Callable[[Source], Iterator[LoggedRequest]],
) -> Trace:
    """Return the trace of the requests that `requests` finds in the source of `rows`; called twice.

    Without any prompt, the trace has lengths only.
    """
    found = [0, 0, 0, 0]  # requests, those with a prompt, and the bytes and tokens of these
    for request in requests(rows.source):
        found[0] += 1
        if request.prompt is not None and request.tokens[0]:
            found[1] += 1
            found[2] += len(request.prompt)
            found[3] += request.tokens[0]
    size = reading.block_tokens or BLOCK_TOKENS
    block_bytes = max(1, round(size * found[2] / found[3])) if found[3] else 0
    answered_s: dict[int, float] = {}
    unknown = 0
    for request in requests(rows.source):
        session = rows.session_of(request.session)
        think_s = math.nan
        if session in answered_s and request.at_s is not None:
            think_s = max(0.0, request.at_s - answered_s[session])
        rows.add(request.line, request.at_s, request.tokens, session, think_s)
        if session >= 0 and not math.isnan(request.ended_s):
            answered_s[session] = request.ended_s
        if not block_bytes:
            continue
        ids: list[int] = []
        extend_chain(ids, request.prompt or b"", block_bytes)
        blocks = request.tokens[0] // size
        del ids[blocks:]
        new = range(unknown, unknown + blocks - len(ids))  # more tokens than the mean: not known
        unknown += len(new)
        rows.chain([*ids, *new], request.model)
    if not block_bytes:
        return with_made_up_ids(rows, reading)
    if found[1] < found[0]:
        rows.remarks.append(
            f"{found[0] - found[1]:,} of its {found[0]:,} requests have no text, so their blocks "
            "count as new"
        )
    return rows.trace(size)
