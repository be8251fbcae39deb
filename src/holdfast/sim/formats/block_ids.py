"""JSON lines with the blocks of each request: Mooncake's, Qwen-Bailian's, and Holdfast's own.

Sources of the two published formats: "Mooncake" (FAST'25) and "KVCache Cache in the Wild" (ATC'25).
"""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec
import numpy as np

from holdfast.sim.formats.rows import Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Bools, Longs, Trace

_log = logging.getLogger(__name__)

BAILIAN_BLOCK_TOKENS = 16

SIZES = tuple(2**i for i in range(3, 13))
"""Block sizes that are tried: powers of two from 8 to 4,096 tokens."""

FIT_SHARE_MIN = 0.5
"""Share of requests that a block size must fit; the other requests are then reported as errors."""

SLACK = 0.1
"""Tolerance for the number of ids at a given block size, because lengths may be estimates."""

Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")]


class MooncakeLine(msgspec.Struct):
    """One request of Mooncake's format; `timestamp` in ms, in all lines or in none.

    Ids are hashes of whole prefixes. Other publishers add `session_id` and `model`; Holdfast also
    writes `block_size`.
    """

    input_length: Tokens
    hash_ids: list[int]
    timestamp: Time | None = None
    output_length: Tokens = 0
    session_id: int | str | None = None
    model: str | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


class BailianLine(msgspec.Struct):
    """One request of Qwen-Bailian's format; `timestamp` in seconds. `turn` and `type` are not used.

    Ids are hashes of single blocks, so `sim.trace` chains them: the same id after another prefix is
    another block.
    """

    chat_id: int
    parent_chat_id: int
    timestamp: Time
    input_length: Tokens
    hash_ids: list[int]
    output_length: Tokens = 0
    model: str | None = None


class RecordedLine(msgspec.Struct):
    """One request that Holdfast recorded; `at_s` on any clock, `keys` of the prompt's full blocks.

    A key names a fingerprint and a whole prefix, so fingerprints share no blocks; keys do not
    reveal text.
    """

    at_s: Time
    fingerprint: Hex
    tokens: Tokens
    keys: list[Hex]
    session: int | str | None = None
    output_tokens: Tokens = 0


def read_mooncake(source: Source, reading: Reading) -> Trace:
    """Read a file of `MooncakeLine`s."""
    rows = Rows(source, reading, "ms")
    block_tokens = reading.block_tokens
    for number, line in source.decoded(msgspec.json.Decoder(MooncakeLine)):
        if line.block_size not in (None, block_tokens):
            if block_tokens is not None:
                raise source.error(
                    number,
                    f"block_size {line.block_size}, but {block_tokens} was given or is above: a "
                    "trace has one block size, and ids cannot be converted; remove the option, or "
                    "split the file",
                )
            block_tokens = line.block_size
        session = rows.session_of(line.session_id)
        rows.add(number, line.timestamp, (line.input_length, line.output_length), session)
        rows.chain(line.hash_ids, line.model)
    rows.check_whole_prompts()
    return rows.trace(*_block_tokens(rows, block_tokens))


def read_bailian(source: Source, reading: Reading) -> Trace:
    """Read a file of `BailianLine`s; a request whose parent is known belongs to its session."""
    rows = Rows(source, reading)
    sessions: dict[int, int] = {}
    for number, line in source.decoded(msgspec.json.Decoder(BailianLine)):
        session = sessions.get(line.parent_chat_id)
        if session is None:
            session = rows.session_of(line.chat_id)
        sessions[line.chat_id] = session
        rows.add(number, line.timestamp, (line.input_length, line.output_length), session)
        rows.chain(line.hash_ids, line.model)
    rows.check_whole_prompts()
    return rows.trace(*_block_tokens(rows, reading.block_tokens or BAILIAN_BLOCK_TOKENS))


def read_recorded(source: Source, reading: Reading) -> Trace:
    """Read a file of `RecordedLine`s."""
    rows = Rows(source, reading)
    names: dict[str, int] = {}
    for number, line in source.decoded(msgspec.json.Decoder(RecordedLine)):
        session = rows.session_of(line.session)
        rows.add(number, line.at_s, (line.tokens, line.output_tokens), session)
        rows.chain([names.setdefault(key, len(names)) for key in line.keys])
    return rows.trace(*_block_tokens(rows, reading.block_tokens))


def _block_tokens(rows: Rows, given: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the block size, and the other sizes that fit the requests as well.

    The size is `given` if not None, else the smallest that fits the requests best.

    A trace lists either all blocks, with a partial last one, or full blocks only. The same block
    size and the same of these two conventions must fit every request. Lengths may be estimates that
    were rounded up; a size that fits without rounding is preferred. Raises TraceError for the first
    request that does not fit.
    """
    rows.check_not_empty()
    counts, tokens = np.array(rows.counts, np.int64), np.array(rows.input_tokens, np.int64)
    others: tuple[int, ...] = ()
    if given:
        size, blocks = given, tokens / given
        fits: Bools = np.abs(counts - blocks) <= 1 + SLACK * blocks
    else:
        rounded = np.maximum(tokens - 1, 0)
        exact = {size: _fit(counts, tokens, size) for size in SIZES}
        loose = {size: exact[size] | _fit(counts, rounded, size) for size in SIZES}
        score = {size: (loose[size].mean(), exact[size].mean()) for size in SIZES}
        size = max(SIZES, key=lambda size: (score[size], -size))
        others = tuple(other for other in SIZES if other != size and score[other] == score[size])
        fits = loose[size]
        if fits.mean() < FIT_SHARE_MIN:
            raise rows.source.error(
                rows.lines[0],
                f"{counts[0]} ids for {tokens[0]} tokens: no power of two from {SIZES[0]} to "
                f"{SIZES[-1]:,} tokens per block fits most lines; give the block size with "
                "--block-tokens",
            )
    if not fits.all():
        at = int(np.argmin(fits))
        raise rows.source.error(
            rows.lines[at],
            f"{counts[at]} ids for {tokens[at]} tokens, but about {tokens[at] / size:.1f} blocks "
            f"of {size} tokens: ids are missing or too many, or the file mixes block sizes; "
            "correct or remove the line, or give the block size with --block-tokens",
        )
    if others:
        _log.warning(
            "%s: blocks of %d tokens are assumed, and blocks of %s tokens fit as well; give the "
            "size with --block-tokens",
            rows.source.path,
            size,
            " or ".join(f"{other:,}" for other in others),
        )
    return size, others


def _fit(counts: Longs, tokens: Longs, size: int) -> Bools:
    """Return which requests fit a size, by the convention that fits more of them."""
    partial: Bools = counts == -(-tokens // size)
    full: Bools = counts == tokens // size
    return partial if partial.mean() >= full.mean() else full
