"""Load a trace of any supported format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from holdfast.errors import TraceError
from holdfast.sim.formats import azure, bailian, burstgpt, mooncake, recorded, sessions, sharegpt
from holdfast.sim.formats.rows import Reading
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

WINDOW_MAX_S = 1e9
"""Maximum `Reading.window_s`."""


class Format(Protocol):
    """The interface of a format's module; `FIELDS` are the field names that identify the format."""

    NAME: str
    FIELDS: frozenset[str]

    def read(self, source: Source, reading: Reading) -> Trace:
        """Read the whole source."""


FORMATS: tuple[Format, ...] = (mooncake, bailian, sessions, burstgpt, azure, sharegpt, recorded)


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
    known = [form for form in FORMATS if fields >= form.FIELDS]
    if not known:
        names = "; ".join(f"{form.NAME} ({', '.join(sorted(form.FIELDS))})" for form in FORMATS)
        found = ", ".join(sorted(repr(field[:40])[1:-1] for field in fields)[:8]) or "no fields"
        raise source.error(0, f"unknown format ({found}); known by their fields: {names}")
    return max(known, key=lambda form: len(form.FIELDS)).read(source, reading)
