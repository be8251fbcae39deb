"""Files with arrival times and lengths only: Azure's, BurstGPT's and others; ids are made up.

A request of a session is assumed to start with the session's previous prompt and answer if it is at
least as long as both; otherwise all its blocks are new. Sessions share no blocks, so hits are a
lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import TraceError
from holdfast.sim.formats.arrivals import TIME_MAX, UNITS_S
from holdfast.sim.formats.rows import BLOCK_TOKENS, TOKENS_MAX, Reading, Rows, Time, Tokens
from holdfast.sim.formats.source import Source, cells_of
from holdfast.sim.trace import UNKNOWN, Trace, arrange


def read_azure(source: Source, reading: Reading) -> Trace:
    """Read Azure's LLM inference CSV, 2023 and 2024; times without a zone are UTC.

    Published with "Splitwise" (ISCA'24) and "DynamoLLM" (HPCA'25), CC-BY.
    """
    rows = Rows(source, reading)
    for line in _csv_lines(source):
        text = line.cells.get("TIMESTAMP", "")
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise line.error(f'TIMESTAMP "{text}": not a date and time') from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        tokens = line.tokens("ContextTokens"), line.tokens("GeneratedTokens")
        rows.add(line.number, at.timestamp(), tokens)
    return with_made_up_ids(rows, reading)


def read_burstgpt(source: Source, reading: Reading) -> Trace:
    """Read BurstGPT's CSV (arXiv 2401.17644), `Timestamp` in seconds.

    Failed requests, with an answer of 0 tokens, are kept. `Session ID` and `Elapsed time` may be
    missing; the latter is the duration of an answer, from which the think time of the session's
    next request follows.
    """
    rows = Rows(source, reading)
    second = UNITS_S[reading.time_unit or "s"]
    answered_s: dict[int, float] = {}
    for line in _csv_lines(source):
        at = line.amount("Timestamp")
        at_s = at * second
        session = rows.session_of(line.cells.get("Session ID") or None)
        think_s = max(0.0, at_s - answered_s[session]) if session in answered_s else math.nan
        tokens = line.tokens("Request tokens"), line.tokens("Response tokens")
        rows.add(line.number, at, tokens, session, think_s)
        if session >= 0 and line.cells.get("Elapsed time"):
            answered_s[session] = at_s + line.amount("Elapsed time")
    return with_made_up_ids(rows, reading)


class LengthsLine(msgspec.Struct):
    """One request of Mooncake's format without ids; `timestamp` in ms, in all lines or in none."""

    input_length: Tokens
    timestamp: Time | None = None
    output_length: Tokens = 0
    session_id: int | str | None = None


def read_mooncake_lengths(source: Source, reading: Reading) -> Trace:
    """Read a file of `LengthsLine`s."""
    rows = Rows(source, reading, "ms")
    for number, line in source.decoded(msgspec.json.Decoder(LengthsLine)):
        session = rows.session_of(line.session_id)
        rows.add(number, line.timestamp, (line.input_length, line.output_length), session)
    return with_made_up_ids(rows, reading)


class CsvLine(NamedTuple):
    """One line of a CSV file, with its cells by column."""

    source: Source
    number: int
    cells: dict[str, str]

    def error(self, what: str) -> TraceError:
        """Return an error that names the line."""
        return self.source.error(self.number, f"{what}; correct or remove the line")

    def amount(self, column: str) -> float:
        """Return a cell as a number. Raises TraceError for another value."""
        text = self.cells.get(column, "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= TIME_MAX:
            raise self.error(f'{column} "{text}": not a number')
        return value

    def tokens(self, column: str) -> int:
        """Return a cell as a number of tokens. Raises TraceError for another value."""
        value = self.amount(column)
        if not 0 <= value <= TOKENS_MAX or value != int(value):
            raise self.error(f"{column} {value:g}: not a number of tokens from 0 to {TOKENS_MAX}")
        return int(value)


def _csv_lines(source: Source) -> Iterator[CsvLine]:
    """Yield the lines below the header, with which each file of a folder starts."""
    lines = source.lines()
    _, header = next(lines, (0, b""))
    columns = dict.fromkeys(cells_of(header))
    for number, line in lines:
        if line == header:
            continue
        cells = cells_of(line)
        if len(cells) != len(columns):
            what = f"{len(cells)} cells under {len(columns)} columns"
            advice = _cells_advice(line, len(cells) > len(columns), next(lines, None) is None)
            raise source.error(number, what + advice)
        yield CsvLine(source, number, dict(zip(columns, cells, strict=True)))


def _cells_advice(line: bytes, has_more: bool, is_last: bool) -> str:  # noqa: FBT001  # facts
    """Return what may be wrong with a line that has more or fewer cells than the header."""
    if line.count(b'"') % 2:
        return ": a quoted line break is not supported; remove it, or remove the column"
    if any(b"," in quoted for quoted in line.split(b'"')[1::2]):
        return ": a quoted comma is not supported; remove it, or remove the column"
    if has_more:
        return ": a cell has a comma in it, or the header lacks a column; correct it"
    if is_last:
        return ": is the file cut? Correct or remove the line"
    return "; correct or remove the line"


def with_made_up_ids(rows: Rows, reading: Reading) -> Trace:
    """Return the trace of these requests, with made-up ids for their full blocks."""
    size = reading.block_tokens or BLOCK_TOKENS
    found = rows.arrivals()
    requests = rows.requests(found)
    rows.check_block_counts(requests.input_tokens // size)
    requests = requests.taken(np.argsort(requests.time_s, kind="stable"))
    chains: dict[int, list[int]] = {}
    history: dict[int, int] = {}
    unused = 0
    for session, tokens, answer in zip(
        requests.session.tolist(),
        requests.input_tokens.tolist(),
        requests.output_tokens.tolist(),
        strict=True,
    ):
        resent = chains[session] if tokens >= history.get(session, math.inf) else []
        fresh = tokens // size - len(resent)
        chain = [*resent, *range(unused, unused + fresh)]
        unused += fresh
        rows.chain(chain)
        if session != UNKNOWN:
            chains[session], history[session] = chain, tokens + answer
    trace = arrange(rows.source.name, size, requests, *rows.blocks())
    return rows.told(trace._replace(content=False), found)
