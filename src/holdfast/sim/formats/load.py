"""Load a trace of any supported format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import TraceError
from holdfast.sim.formats import sessions, sharegpt
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


FORMATS = (
    Format("Mooncake JSONL", {"timestamp", "input_length", "hash_ids"}, read_mooncake),
    Format(
        "Qwen-Bailian JSONL",
        {"chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids"},
        read_bailian,
    ),
    Format(
        "agent sessions, JSON lines (Claude Code)",
        {"block_size", "requests", "t"},
        sessions.read,
    ),
    Format("BurstGPT CSV", {"Timestamp", "Request tokens", "Response tokens"}, read_burstgpt),
    Format(
        "Azure LLM inference CSV", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, read_azure
    ),
    Format("ShareGPT-like JSON", {"conversations", "from", "value"}, sharegpt.read),
    Format("Holdfast's recorded events", {"at_s", "fingerprint", "tokens", "keys"}, read_recorded),
)


def load(path: str | Path, reading: Reading | None = None) -> Trace:
    """Load a trace, plain or gzip; the content, not the file name, determines the format.

    Raises:
        TraceError: the file cannot be read, its format is not supported, or a line is invalid; the
            message names the line and the remedy.
    """
    reading = reading or Reading()
    if reading.block_tokens is not None and reading.block_tokens < 1:
        raise TraceError(f"block size of {reading.block_tokens} tokens: give 1 or more")
    if not 0 <= reading.window_s <= WINDOW_MAX_S:
        raise TraceError(f"window of {reading.window_s:g} s: give 0 to {WINDOW_MAX_S:g}")
    source = Source(Path(path))
    fields = source.fields()
    known = [form for form in FORMATS if fields >= form.fields]
    if not known:
        names = "; ".join(f"{form.name} ({', '.join(sorted(form.fields))})" for form in FORMATS)
        found = ", ".join(sorted(repr(field[:40])[1:-1] for field in fields)[:8]) or "no fields"
        raise source.error(0, f"unknown format ({found}); known by their fields: {names}")
    return max(known, key=lambda form: len(form.fields)).read(source, reading)
