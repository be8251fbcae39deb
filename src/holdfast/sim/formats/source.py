"""Numbered records of a trace's files, and errors that name file and line."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import TraceError
from holdfast.sim.formats.files import TraceFile, readable, trace_files

HEAD_BYTES = 1 << 16
"""Bytes read to find the field names that identify a format."""

_FIELD = re.compile(rb'"([A-Za-z_]\w*)"\s*:')
_ANY = msgspec.json.Decoder(msgspec.Raw)
_ENTRIES = msgspec.json.Decoder(list[msgspec.Raw])
_Line = TypeVar("_Line")


class Source:
    """The files of one trace, read in order as one; close it after use.

    Every error that it raises or that `error` returns is a `TraceError` that names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = ExitStack()
        self._trace_files: list[TraceFile] | None = None
        self._files: list[str] = []
        self._begins: list[int] = []
        self._read_lines = 0

    def close(self) -> None:
        """Delete what was unpacked."""
        self._opened.close()

    @property
    def name(self) -> str:
        """The file's name without its suffixes."""
        return self.path.name.partition(".")[0]

    def place(self, line: int) -> str:
        """Return file and line of a line number from `lines`; 0 stands for the whole source."""
        at = bisect_left(self._begins, line) - 1
        return f"{self._files[at]}:{line - self._begins[at]}" if line else str(self.path)

    def error(self, line: int, what: str) -> TraceError:
        """Return an error at one line; 0 stands for the whole source."""
        return TraceError(f"{self.place(line)}: {what}")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, line) of every line that is not blank; numbers continue across files."""
        return chain.from_iterable(self._lines_by_file())

    def _lines_by_file(self) -> Iterator[Iterator[tuple[int, bytes]]]:
        """Yield the lines of each file; the caller reads all of them before the next file."""
        self._files, self._begins, self._read_lines = [], [], 0
        if self._trace_files is None:
            self._trace_files = trace_files(self.path, self._opened)
        for file in self._trace_files:
            self._files.append(file.name)
            self._begins.append(self._read_lines)
            yield self._read(file)

    def _read(self, file: TraceFile) -> Iterator[tuple[int, bytes]]:
        at = 0
        try:
            with file.opened() as opened, readable(file.name, opened, lambda: at + 1) as lines:
                for at, line in enumerate(lines, 1):
                    self._read_lines += 1
                    text = line.removeprefix(codecs.BOM_UTF8) if at == 1 else line
                    if not text.isspace():
                        yield self._read_lines, text
        except OSError as error:
            raise TraceError(f"{file.name}: cannot be read: {error.strerror}") from None

    def head(self) -> bytes:
        """Return the first `HEAD_BYTES` bytes, without blank lines."""
        head = b""
        for _, line in self.lines():
            head += line[: HEAD_BYTES - len(head)]
            if len(head) >= HEAD_BYTES:
                break
        return head

    def fields(self) -> set[str]:
        """Return the JSON field names or CSV columns in the first `HEAD_BYTES` bytes."""
        head = self.head()
        if head.lstrip()[:1] in (b"{", b"["):
            return {name.decode() for name in _FIELD.findall(head)}
        return set(cells_of(head.partition(b"\n")[0]))

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number of its first line, JSON text) of every record.

        A record is a line; an entry of a list, which is a whole file and read into memory at once;
        or an indented object that ends with the first line that begins with a brace.
        """
        for lines in self._lines_by_file():
            number, line = next(lines, (0, b""))
            if line.lstrip()[:1] == b"[":
                yield from self._entries([(number, line), *lines])
            elif line[:1] == b"{" and _ends_early(line):
                pending = [line]
                for next_number, next_line in lines:
                    number = number if pending else next_number
                    pending.append(next_line)
                    if next_line[:1] == b"}":
                        yield number, b"".join(pending)
                        pending = []
                if pending:
                    yield number, b"".join(pending)
            elif line:
                yield number, line
                yield from lines

    def _entries(self, lines: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the entries of a file that is one JSON list."""
        ends = [*accumulate(len(line) for _, line in lines)]
        text, at = b"".join(line for _, line in lines), 0
        for entry in self.decode(_ENTRIES, text.rstrip(), lines[0][0]):
            at = text.index(entry, at)
            yield lines[bisect_right(ends, at)][0], bytes(entry)
            at += len(bytes(entry))

    def decoded(self, decoder: msgspec.json.Decoder[_Line]) -> Iterator[tuple[int, _Line]]:
        """Yield (number, decoded record) of every record."""
        for number, line in self.records():
            yield number, self.decode(decoder, line, number)

    def decode(self, decoder: msgspec.json.Decoder[_Line], text: bytes, number: int) -> _Line:
        """Decode one record. Raises TraceError with its number."""
        try:
            return decoder.decode(text)
        except msgspec.ValidationError as error:
            raise self.error(number, f"{error}; correct or remove the line") from None
        except RecursionError:
            raise self.error(number, "nested too deeply; correct or remove the line") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what = f"not JSON ({error}); correct or remove the line"
            if "truncated" in str(error):
                what = (
                    f"not JSON ({error}): the record does not end on this line; write each record "
                    "on one line, as `jq -c .` does, or correct or remove the line"
                    if text.endswith(b"\n")
                    else f"not JSON ({error}): is the file cut? Correct or remove the line"
                )
            raise self.error(number, what) from None


def cells_of(line: bytes) -> list[str]:
    """Return the cells of a line of a CSV file, without quotation marks."""
    return [cell.strip().strip('"') for cell in line.decode(errors="replace").split(",")]


def _ends_early(text: bytes) -> bool:
    """Return whether text is the beginning of JSON."""
    try:
        _ANY.decode(text)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    except RecursionError:
        return False
    return False
