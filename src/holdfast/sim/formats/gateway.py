"""Logs of gateways: lines with OpenAI's `usage`, and LiteLLM's spend logs.

A line of the first kind is a response of an OpenAI-compatible API, a record with the request and
the response, or one with the fields of `usage` among its own. LiteLLM's logs are rows of its table
`LiteLLM_SpendLogs`. Both may be JSON or CSV. Prompts are in a log only if the gateway was told to
store them; otherwise the trace has lengths only.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.errors import TraceError
from holdfast.sim.formats.arrivals import TIME_MAX
from holdfast.sim.formats.rows import TOKENS_MAX, Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.formats.texts import LoggedRequest, read_requests
from holdfast.sim.trace import Trace

_ENTRY = msgspec.json.Decoder(dict[str, Any])

_PLACES = ((), ("response",), ("response", "body"), ("request",), ("request", "body"), ("body",))
"""Where fields of a request and its response are in records of known gateways."""

_GENERATED = "completion", "chat", "responses", "messages", "generate"
"""Parts of the names of LiteLLM's calls that use context; others, such as `aembedding`, do not."""

_NUMBER = re.compile(r"\d{1,20}(\.\d{1,9})?")
"""Seconds since 1970, or in another unit, in a column of a CSV file."""

Fields = Mapping[str, Any]


def read_usage(source: Source, reading: Reading) -> Trace:
    """Read lines with `usage`, of OpenAI's completions, chats and responses, or Anthropic's."""
    return read_requests(Rows(source, reading), reading, _usage_lines)


def read_litellm(source: Source, reading: Reading) -> Trace:
    """Read LiteLLM's spend logs, but for failed requests and those that its own cache served.

    Raises TraceError if none is left.
    """
    rows = Rows(source, reading)
    left_out = 0

    def requests(source: Source) -> Iterator[LoggedRequest]:
        nonlocal left_out
        left_out = 0
        for number, fields in _rows_of(source):
            request = _spend_log(source, number, fields)
            if request is None:
                left_out += 1
            else:
                yield request

    trace = read_requests(rows, reading, requests)
    remark = f"{left_out:,} rows are left out: failed, served by LiteLLM's own cache, or no chats"
    return trace._replace(remarks=(*trace.remarks, remark)) if left_out else trace


def _usage_lines(source: Source) -> Iterator[LoggedRequest]:
    sessions: dict[str, str] = {}  # of answers that a later request continues
    for number, entry in _rows_of(source):
        parts = [part for part in (_at(entry, place) for place in _PLACES) if part is not None]
        usage = _value(_first(parts, "usage"))
        if usage is None:
            usage = next((part for part in parts if "prompt_tokens" in part), None)
        if not isinstance(usage, Mapping):
            raise source.error(number, "no usage in it; correct or remove the line")
        prompt_tokens = _tokens(source, number, usage, ("prompt_tokens", "input_tokens"))
        for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):  # Anthropic's
            prompt_tokens += _tokens(source, number, usage, (name,), 0)
        answer = _tokens(source, number, usage, ("completion_tokens", "output_tokens"), 0)
        stamp = _first(parts, "created", "created_at", "timestamp", "time", "ts")
        session = _first(parts, "session_id", "conversation_id")
        before = _first(parts, "previous_response_id")
        answer_id = _first(parts, "id")
        session = str(session) if session is not None else None
        if session is None and isinstance(answer_id, str):
            session = sessions.get(
                str(before), answer_id if before or _is_response(parts) else None
            )
        if isinstance(answer_id, str) and session is not None:
            sessions[answer_id] = session
        model = _first(parts, "model")
        yield LoggedRequest(
            number,
            None if stamp is None else _time(source, number, "created", stamp),
            (prompt_tokens, answer),
            None if before else _prompt(parts),  # a continued request lists its new input only
            session,
            model if isinstance(model, str) else None,
        )


def _is_response(parts: list[Fields]) -> bool:
    return any(part.get("object") == "response" for part in parts)


def _rows_of(source: Source) -> Iterator[tuple[int, Fields]]:
    """Yield (line, row) of JSON lines, of a list, of an answer's `data`, or of a CSV file."""
    if source.head().lstrip()[:1] in (b"{", b"["):
        for number, entry in source.decoded(_ENTRY):
            rows = entry.get("data")
            for row in rows if isinstance(rows, list) else [entry]:
                if not isinstance(row, Mapping):
                    raise source.error(number, "an entry of data is no object; correct it")
                yield number, row
        return
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in source.lines():  # noqa: B007  # for the error
            yield line.decode(errors="replace")

    try:
        for row in csv.DictReader(lines()):
            yield number, row
    except csv.Error as error:
        raise source.error(number, f"not CSV ({error}); export the table as JSON") from None


def _spend_log(source: Source, number: int, fields: Fields) -> LoggedRequest | None:
    """Return the request of a row; None if it has not reached an engine."""
    call = str(fields.get("call_type") or "chat").lower()
    status = str(fields.get("status") or "success").lower()
    tokens = (
        _tokens(source, number, fields, ("prompt_tokens",)),
        _tokens(source, number, fields, ("completion_tokens",), 0),
    )
    cached = str(fields.get("cache_hit")).lower() == "true"
    if cached or status == "failure" or not tokens[0] or not any(one in call for one in _GENERATED):
        return None
    stamps = [fields.get(name) for name in ("startTime", "endTime")]
    started_s, ended_s = (
        math.nan if stamp in (None, "") else _time(source, number, name, stamp)
        for name, stamp in zip(("startTime", "endTime"), stamps, strict=True)
    )
    parts = [
        part
        for part in (_value(fields.get("proxy_server_request")), fields)
        if isinstance(part, Mapping)
    ]
    session = fields.get("session_id")
    return LoggedRequest(
        number,
        None if math.isnan(started_s) else started_s,
        tokens,
        _prompt(parts),
        str(session) if session else None,
        str(fields.get("model") or "") or None,
        ended_s,
    )


def _prompt(parts: list[Fields]) -> bytes | None:
    """Return the prompt of a request as bytes: the beginning of a longer one is the same bytes."""
    content = None
    for name in ("messages", "input", "prompt"):
        content = content or _value(_first(parts, name))
    if not content:
        return None
    tools, system = _value(_first(parts, "tools")), _value(_first(parts, "system", "instructions"))
    text = (
        content.encode(errors="replace")
        if isinstance(content, str)
        else msgspec.json.encode(content)[:-1]
    )
    return b"".join(msgspec.json.encode(part) for part in (tools, system) if part) + text


def _value(field: object) -> object:
    """Return the value of a field, which a database may have exported as JSON text."""
    if isinstance(field, str) and field[:1] in ("{", "["):
        try:
            return msgspec.json.decode(field)
        except (msgspec.DecodeError, RecursionError):
            return field
    return field


def _at(entry: Fields, place: tuple[str, ...]) -> Fields | None:
    for name in place:
        inner = entry.get(name)
        if not isinstance(inner, Mapping):
            return None
        entry = inner
    return entry


def _first(parts: list[Fields], *names: str) -> object:
    """Return the first field that is there and not null; None without one."""
    return next(
        (part[name] for name in names for part in parts if part.get(name) is not None), None
    )


def _tokens(
    source: Source, number: int, fields: Fields, names: tuple[str, ...], default: int | None = None
) -> int:
    """Return a number of tokens. Raises TraceError if it is missing or invalid."""
    name = next((name for name in names if fields.get(name) not in (None, "")), None)
    if name is None and default is not None:
        return default
    if name is None:
        raise _wrong(source, number, f"no {' or '.join(names)}")
    text = str(fields[name])
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= TOKENS_MAX):  # noqa: PLR2004
        raise _wrong(source, number, f'{name} "{text[:40]}": not a number of tokens')
    return int(text)


def _time(source: Source, number: int, name: str, stamp: object) -> float:
    """Return a time in seconds since 1970, or in the unit of the log. Raises TraceError."""
    if isinstance(stamp, str) and _NUMBER.fullmatch(stamp):
        stamp = float(stamp)
    if isinstance(stamp, str):
        try:
            at = datetime.fromisoformat(stamp)
        except ValueError:
            raise _wrong(source, number, f'{name} "{stamp[:40]}": not a date and time') from None
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not abs(stamp) <= TIME_MAX:
        raise _wrong(source, number, f"{name} {str(stamp)[:40]}: not a time")
    return float(stamp)


def _wrong(source: Source, number: int, what: str) -> TraceError:
    return source.error(number, f"{what}; correct or remove the line")
