"""A CSV file read by column name, with errors that name line, column and value."""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.sim.formats.rows import TIME_MAX, TOKENS_MAX
from holdfast.sim.formats.source import Source, columns


class Table:
    """The rows of a CSV file; the first line names the columns. Quoted commas are not supported."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._at: dict[str, int] = {}
        self._line = 0

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (line number, cells) of each row below the header."""
        header = b""
        for number, line in self.source.lines():
            if line == header:  # each file of a folder starts with it
                continue
            if not self._at:
                header = line
                self._at = {name: at for at, name in enumerate(columns(line))}
                continue
            self._line = number
            cells = line.decode("utf-8", errors="replace").strip().split(",")
            if len(cells) != len(self._at):
                raise self.source.error(
                    number,
                    f"{len(cells)} cells under {len(self._at)} columns: is the file cut? "
                    "Correct or remove the line",
                )
            yield number, cells

    def text(self, cells: list[str], column: str) -> str:
        """Return a cell as text; empty if the column does not exist."""
        at = self._at.get(column)
        return "" if at is None else cells[at].strip().strip('"')

    def number(self, cells: list[str], column: str) -> float:
        """Return a cell as a number. Raises TraceError for another value."""
        text = self.text(cells, column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= TIME_MAX:
            raise self.source.error(
                self._line, f'{column} "{text}": not a number; correct or remove the line'
            )
        return value

    def tokens(self, cells: list[str], column: str) -> int:
        """Return a cell as a number of tokens. Raises TraceError for another value."""
        value = self.number(cells, column)
        if not 0 <= value <= TOKENS_MAX or value != int(value):
            raise self.source.error(
                self._line,
                f"{column} {value:g}: not a number of tokens from 0 to {TOKENS_MAX}; "
                "correct or remove the line",
            )
        return int(value)
