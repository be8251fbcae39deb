"""BurstGPT CSV: `Timestamp` in seconds, `Request tokens`, `Response tokens`, later `Session ID`.

Published with "BurstGPT" (arXiv 2401.17644). Failed requests, with an answer of 0 tokens, are kept.
The trace has no block ids; see `arrivals`. `Elapsed time`, if present, is the duration of an
answer, from which the think time of the session's next request follows.
"""

from __future__ import annotations

import math

from holdfast.sim.formats import arrivals
from holdfast.sim.formats.rows import Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.formats.table import Table
from holdfast.sim.trace import Trace

NAME = "BurstGPT CSV"
FIELDS = frozenset({"Timestamp", "Request tokens", "Response tokens"})


def read(source: Source, reading: Reading) -> Trace:
    """Read the file."""
    rows, table = Rows(source), Table(source)
    answered_s: dict[int, float] = {}
    for number, cells in table.rows():
        at_s = table.number(cells, "Timestamp")
        session = rows.session_of(table.text(cells, "Session ID") or None)
        think_s = max(0.0, at_s - answered_s[session]) if session in answered_s else math.nan
        tokens = table.tokens(cells, "Request tokens"), table.tokens(cells, "Response tokens")
        rows.add(number, at_s, tokens, session, think_s)
        if session >= 0 and table.text(cells, "Elapsed time"):
            answered_s[session] = at_s + table.number(cells, "Elapsed time")
    return arrivals.with_made_up_ids(rows, reading)
