"""Load a trace of any supported format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import TraceError
from holdfast.sim.formats import sessions, sharegpt
from holdfast.sim.formats.arrivals import UNITS_S
from holdfast.sim.formats.block_ids import read_bailian, read_mooncake, read_recorded
from holdfast.sim.formats.lengths import read_azure, read_burstgpt
from holdfast.sim.formats.rows import Reading
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

WINDOW_MAX_S = 1e9
"""Maximum `Reading.window_s`."""


class Format(NamedTuple):
    """A format: its name, the field names that identify it, and the function that reads it."""

    name: str
    fields: set[str]
    read: Callable[[Source, Reading], Trace]
    unit: str = ""
    """Unit of its times, if the times of a file may be in another one."""


FORMATS = (
    Format("Mooncake JSONL", {"input_length", "hash_ids"}, read_mooncake, "ms"),
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
    known = [form for form in FORMATS if fields >= form.fields]
    if not known:
        names = "; ".join(f"{form.name} ({', '.join(sorted(form.fields))})" for form in FORMATS)
        found = ", ".join(sorted(repr(field[:40])[1:-1] for field in fields)[:8]) or "no fields"
        raise source.error(0, f"unknown format ({found}); known by their fields: {names}")
    form = max(known, key=lambda form: len(form.fields))
    if reading.time_unit and not form.unit:
        raise source.error(
            0, f"time unit {reading.time_unit}: {form.name} says the unit itself; omit it"
        )
    return form.read(source, reading)
