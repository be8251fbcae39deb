"""Load a trace of any known format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from holdfast.errors import TraceError
from holdfast.sim.formats import (
    azure,
    bailian,
    burstgpt,
    mooncake,
    recorded,
    sessions,
    sharegpt,
)
from holdfast.sim.formats.rows import Reading
from holdfast.sim.formats.source import Source
from holdfast.sim.trace import Trace

WINDOW_MAX_S = 1e9
"""Most seconds within which sessions may start: a life's work."""


class Format(Protocol):
    """What a module of a format offers; `FIELDS` are the field names that tell it apart."""

    NAME: str
    FIELDS: frozenset[str]

    def read(self, source: Source, reading: Reading) -> Trace:
        """Read the whole file."""


FORMATS: tuple[Format, ...] = (
    mooncake,
    bailian,
    sessions,
    burstgpt,
    azure,
    sharegpt,
    recorded,
)


def load(path: str | Path, reading: Reading | None = None) -> Trace:
    """Load a trace, plain or gzip; its format is told by its content, not by its name.

    Raises:
        TraceError: the file can not be read, is of no known format, or something in it is wrong;
            the message names the line and the remedy.
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
        raise source.fault(0, f"unknown format ({found}); known by their fields: {names}")
    return max(known, key=lambda form: len(form.FIELDS)).read(source, reading)
