"""The log of a vLLM server that logs its requests (`--enable-log-requests`).

Prompts are in the log as text or tokens: at level DEBUG in newer versions, at INFO in older ones.
Lengths of answers are in it with `--enable-log-outputs`. Times are whole seconds without a year.
"""

from __future__ import annotations

import ast
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

from holdfast.sim.formats.rows import Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.formats.texts import LoggedRequest, read_requests
from holdfast.sim.trace import Trace

_COLOUR = rb"(?:\x1b\[[\d;]*m)*"
LINE = re.compile(
    rb"(?<![A-Z])(?:DEBUG|INFO|WARNING|ERROR)C (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,]\d+)?C "
    rb"\[[^\]]*\]C (.*)".replace(b"C ", _COLOUR + b" " + _COLOUR)
)
"""A line of vLLM's log: month, day, hour, minute, second, message; there may be colours."""

_RECEIVED = re.compile(rb"(?:Received request (\S+): |Request (\S+) details: )(.*)")
_ANSWERED = re.compile(rb"Generated response (\S+?)(?: \(streaming complete\))?(?: details)?: (.*)")
_PROMPT = re.compile(rb"""prompt: ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None)""")
_TOKENS = re.compile(rb"prompt_token_ids: \[([\d, ]*)\]")
_ANSWER = re.compile(rb"output_token_ids: \[([\d, ]*)\]")

_TEXT_TOKEN_BYTES = 4
_YEAR = 2004
"""The year of a log's first line, which has none: a leap year, so that every date is one."""

_CUT_SHARE = 0.5
"""Share of requests with one and the same greatest length above which prompts are called cut."""

_CUT_REQUESTS_MIN = 10


def read(source: Source, reading: Reading) -> Trace:
    """Read a log. Raises TraceError if it has no prompts."""
    rows = Rows(source, reading)
    found = [*_requests(source)]
    if not found:
        raise source.error(0, _NO_PROMPTS)
    longest, times = max(Counter(request.tokens[0] for request in found).items())
    if len(found) >= _CUT_REQUESTS_MIN and times > _CUT_SHARE * len(found):
        rows.remarks.append(
            f"{times:,} of its {len(found):,} prompts have the length {longest:,}: if the server "
            "ran with --max-log-len, prompts are cut, and hits and lengths are wrong"
        )
    rows.remarks.append("its times are whole seconds")
    if not any(request.tokens[1] for request in found):
        rows.remarks.append("it has no lengths of answers; add --enable-log-outputs to the server")
    return read_requests(rows, reading, lambda _: iter(found))


_NO_PROMPTS = (
    "a log of vLLM without prompts or their tokens; start the server with --enable-log-requests "
    "and VLLM_LOGGING_LEVEL=DEBUG"
)


def _requests(source: Source) -> Iterator[LoggedRequest]:
    """Yield the requests whose prompts are in the log, in order of arrival."""
    arrived: dict[bytes, tuple[int, float]] = {}
    prompts: dict[bytes, tuple[bytes, int]] = {}
    answers: dict[bytes, int] = {}
    year, month = _YEAR, b""
    for number, line in source.lines():
        if (entry := LINE.search(line)) is None:
            continue
        if month == b"12" and entry[1] == b"01":
            year += 1
        month = entry[1]
        if received := _RECEIVED.match(entry[6]):
            request = received[1] or received[2]
            if request not in arrived:
                arrived[request] = number, _time(source, number, year, entry)
            if (found := _prompt(received[3])) is not None:
                prompts[request] = found
        elif (answered := _ANSWERED.match(entry[6])) and (tokens := _ANSWER.search(answered[2])):
            answers[answered[1]] = max(answers.get(answered[1], 0), _count(tokens[1]))
    for request, (number, at_s) in arrived.items():
        if request in prompts:
            prompt, length = prompts[request]
            yield LoggedRequest(number, at_s, (length, answers.get(request, 0)), prompt)


def _prompt(details: bytes) -> tuple[bytes, int] | None:
    """Return the tokens of a prompt, four bytes each, or its text; and its length in tokens."""
    quoted = _PROMPT.match(details)
    try:
        if tokens := _TOKENS.search(details, quoted.end() if quoted else 0):
            ids = [int(token) & 0xFFFFFFFF for token in tokens[1].split(b",") if token.strip()]
            return array("I", ids).tobytes(), len(ids)
        if quoted is None or quoted[1] == b"None":
            return None
        text = str(ast.literal_eval(quoted[1].decode(errors="replace"))).encode(errors="replace")
    except (SyntaxError, ValueError):
        return None
    return text, -(-len(text) // _TEXT_TOKEN_BYTES)


def _count(tokens: bytes) -> int:
    return tokens.count(b",") + 1 if tokens.strip() else 0


def _time(source: Source, number: int, year: int, entry: re.Match[bytes]) -> float:
    month, day, hour, minute, second = (int(part) for part in entry.groups()[:5])
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        raise source.error(
            number,
            f'"{month:02d}-{day:02d} {hour:02d}:{minute:02d}:{second:02d}": not a date and time; '
            "correct or remove the line",
        ) from None
