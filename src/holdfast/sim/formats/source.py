"""Numbered lines of a trace file or folder, plain or gzip, and errors that name file and line."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import TraceError

HEAD_BYTES = 1 << 16
"""Bytes read to find the field names that identify a format."""

_GZIP = b"\x1f\x8b"
_FIELD = re.compile(rb'"([A-Za-z_]\w*)"\s*:')
_TRACE = re.compile(r"\.(jsonl?|csv)(\.gz)?$")
_Line = TypeVar("_Line")


class Source:
    """One file, or a folder whose files are read in the order of their names, as one.

    Every error that it raises or that `error` returns is a `TraceError` that names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[Path] = []
        self._begins: list[int] = []

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
        number = 0
        self._files, self._begins = [], []
        files = [self.path]
        if self.path.is_dir():
            files = [file for file in sorted(self.path.iterdir()) if _TRACE.search(file.name)]
            if not files:
                raise self.error(0, "no .json, .jsonl or .csv file in this folder, plain or .gz")
        for file in files:
            self._files.append(file)
            self._begins.append(number)
            for line in self._read(file, number):
                number += 1
                if not line.isspace():
                    yield number, line

    def _read(self, file: Path, before: int) -> Iterator[bytes]:
        number = before
        try:
            with file.open("rb") as opened:
                compressed = opened.read(2) == _GZIP
            with gzip.open(file) if compressed else file.open("rb") as lines:
                for number, line in enumerate(lines, before + 1):
                    yield line.removeprefix(codecs.BOM_UTF8) if number == before + 1 else line
        except EOFError:
            raise self.error(
                number + 1, "the gzip data ends early: the file is truncated; fetch it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.error(
                number + 1, f"the gzip data is damaged ({error}); fetch the file again"
            ) from None
        except OSError as error:
            raise TraceError(f"{file}: cannot be read: {error.strerror}") from None

    def fields(self) -> set[str]:
        """Return the JSON field names or CSV columns in the first `HEAD_BYTES` bytes."""
        head = b""
        for _, line in self.lines():
            head += line[: HEAD_BYTES - len(head)]
            if len(head) >= HEAD_BYTES:
                break
        if head.lstrip()[:1] in (b"{", b"["):
            return {name.decode() for name in _FIELD.findall(head)}
        return set(cells_of(head.partition(b"\n")[0]))

    def decoded(self, decoder: msgspec.json.Decoder[_Line]) -> Iterator[tuple[int, _Line]]:
        """Yield (number, decoded line) of every line."""
        for number, line in self.lines():
            yield number, self.decode(decoder, line, number)

    def decode(self, decoder: msgspec.json.Decoder[_Line], line: bytes, number: int) -> _Line:
        """Decode one line. Raises TraceError with its number."""
        try:
            return decoder.decode(line)
        except msgspec.ValidationError as error:
            raise self.error(number, f"{error}; correct or remove the line") from None
        except RecursionError:
            raise self.error(number, "nested too deeply; correct or remove the line") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.error(
                number, f"not JSON ({error}): is the file cut? Correct or remove the line"
            ) from None


def cells_of(line: bytes) -> list[str]:
    """Return the cells of a line of a CSV file, without quotation marks."""
    return [cell.strip().strip('"') for cell in line.decode(errors="replace").split(",")]
