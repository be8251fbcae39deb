"""Azure's LLM inference CSV, 2023 and 2024: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.

Published with "Splitwise" (ISCA'24) and "DynamoLLM" (HPCA'25), CC-BY. The trace has no block ids;
see `arrivals`.
"""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.sim.formats import arrivals
from holdfast.sim.formats.rows import Reading, Rows
from holdfast.sim.formats.source import Source
from holdfast.sim.formats.table import Table
from holdfast.sim.trace import Trace

NAME = "Azure LLM inference CSV"
FIELDS = frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})


def read(source: Source, reading: Reading) -> Trace:
    """Read the file; times without a zone are UTC."""
    rows, table = Rows(source), Table(source)
    for number, cells in table.rows():
        text = table.text(cells, "TIMESTAMP")
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise source.error(
                number, f'TIMESTAMP "{text}": not a date and time; correct or remove the line'
            ) from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        tokens = table.tokens(cells, "ContextTokens"), table.tokens(cells, "GeneratedTokens")
        rows.add(number, at.timestamp(), tokens)
    return arrivals.with_made_up_ids(rows, reading)
