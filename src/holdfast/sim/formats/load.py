"""Load a trace of any supported format."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import TraceError
from holdfast.sim.formats import sessions, sharegpt, vllm_log
from holdfast.sim.formats.arrivals import UNITS_S
from holdfast.sim.formats.block_ids import read_bailian, read_mooncake, read_recorded
from holdfast.sim.formats.gateway import read_litellm, read_usage
from holdfast.sim.formats.lengths import read_azure, read_burstgpt, read_mooncake_lengths
from holdfast.sim.formats.rows import Reading
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

WINDOW_MAX_S = 1e9
"""Maximum `Reading.window_s`."""


class Format(NamedTuple):
    """A format: its name, what identifies it, and the function that reads it."""

    name: str
    fields: set[str]
    """Names of fields or columns that it has; the known format with most of them is taken."""
    read: Callable[[Source, Reading], Trace]
    unit: str = ""
    """Unit of its times, if the times of a file may be in another one."""
    line: re.Pattern[bytes] | None = None
    """What a line looks like, for a format without fields."""


FORMATS = (
    Format("Mooncake JSONL", {"input_length", "hash_ids"}, read_mooncake, "ms"),
    Format("Mooncake JSONL without ids", {"input_length"}, read_mooncake_lengths, "ms"),
    Format(
        "Qwen-Bailian JSONL",
        {"chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids"},
        read_bailian,
        "s",
    ),
    Format(
        "agent sessions, JSON lines (Claude Code)",
        {"block_size", "requests", "t"},
        sessions.read,
    ),
    Format("BurstGPT CSV", {"Timestamp", "Request tokens", "Response tokens"}, read_burstgpt, "s"),
    Format(
        "Azure LLM inference CSV", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, read_azure
    ),
    Format("ShareGPT-like JSON", {"conversations", "from", "value"}, sharegpt.read),
    Format(
        "Holdfast's recorded events", {"at_s", "fingerprint", "tokens", "keys"}, read_recorded, "s"
    ),
    Format("OpenAI usage lines, JSON or CSV", {"usage"}, read_usage),
    Format("OpenAI usage lines without the object", {"prompt_tokens"}, read_usage),
    Format(
        "LiteLLM spend logs, JSON or CSV",
        {"startTime", "prompt_tokens", "completion_tokens"},
        read_litellm,
    ),
    Format("log of vLLM with its requests", set(), vllm_log.read, line=vllm_log.LINE),
)


def formats_text() -> str:
    """Return a table of the formats, one on a line: the name, and what identifies it."""
    width = max(len(form.name) for form in FORMATS)
    return "\n".join(
        f"{form.name:<{width}}  {', '.join(sorted(form.fields)) or 'INFO 11-27 12:50:00 [...] ...'}"
        for form in FORMATS
    )


def load(path: str | Path, reading: Reading | None = None) -> Trace:
    """Load a trace: a file, a folder or a tar archive, plain or compressed by gzip, xz or bzip2.

    The content, not the file name, determines the format.

    Raises:
        TraceError: the file cannot be read, its format is not supported, or a line is invalid; the
            message names the line and the remedy.
    """
    reading = reading or Reading()
    if reading.block_tokens is not None and reading.block_tokens < 1:
        raise TraceError(f"block size of {reading.block_tokens} tokens: give 1 or more")
    if not 0 <= reading.window_s <= WINDOW_MAX_S:
        raise TraceError(f"window of {reading.window_s:g} s: give 0 to {WINDOW_MAX_S:g}")
    if reading.time_unit not in (None, *UNITS_S):
        raise TraceError(f"time unit {reading.time_unit}: give one of {', '.join(UNITS_S)}")
    with closing(Source(Path(path))) as source:
        return _load(source, reading)


def _load(source: Source, reading: Reading) -> Trace:
    fields = source.fields()
    known = [form for form in FORMATS if form.fields and fields >= form.fields]
    if not known:
        head = source.head()
        known = [form for form in FORMATS if form.line and form.line.search(head)]
    if not known:
        names = "; ".join(
            f"{form.name} ({', '.join(sorted(form.fields)) or 'by its lines'})" for form in FORMATS
        )
        found = ", ".join(sorted(repr(field[:40])[1:-1] for field in fields)[:8]) or "no fields"
        raise source.error(
            0,
            f"unknown format ({found}){_hint(source, fields)}; known by their fields: {names}; "
            "`holdfast sim --help` lists them",
        )
    form = max(known, key=lambda form: len(form.fields))
    if reading.time_unit and not form.unit:
        raise source.error(
            0, f"time unit {reading.time_unit}: {form.name} says the unit itself; omit it"
        )
    return form.read(source, reading)


def _hint(source: Source, fields: set[str]) -> str:
    """Return what is missing for the format of which most fields are there; empty for none."""
    if "servegen" in source.name.lower() and fields == {"input_tokens", "output_tokens"}:
        return "; ServeGen's rates and histograms are no requests: generate them with ServeGen"
    near = max(FORMATS, key=lambda form: len(form.fields & fields) / max(1, len(form.fields)))
    missing = sorted(near.fields - fields)
    if 2 * len(missing) >= len(near.fields):
        return ""
    return f"; nearest is {near.name}, but {', '.join(missing)} is missing"
