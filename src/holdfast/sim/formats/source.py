"""A trace file as lines with numbers, plain or gzip, and errors that say where they are."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from holdfast.errors import TraceError

HEAD_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
_FIELD = re.compile(rb'"([A-Za-z_]\w*)"\s*:')
_Line = TypeVar("_Line")


class Source:
    """One file; every error raised here or made by `fault` is a `TraceError` that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The file's name without its endings."""
        return self.path.name.partition(".")[0]

    def fault(self, line: int, what: str) -> TraceError:
        """An error at one line; line 0 is the file as a whole."""
        return TraceError(f"{self.path}:{line}: {what}" if line else f"{self.path}: {what}")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line that isn't blank, with its number from 1 on; streamed."""
        number = 0
        try:
            with self._opened() as file:
                for number, line in enumerate(file, 1):
                    if not line.isspace():
                        yield number, line
        except EOFError:
            raise self.fault(
                number + 1, "the gzip data ends early: the file is cut; fetch it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self.fault(
                number + 1, f"the gzip data is damaged ({error}); fetch the file again"
            ) from None
        except OSError as error:
            raise self.fault(0, f"can not be read: {error.strerror}") from None

    def whole(self) -> bytes:
        """The file in one piece."""
        return b"".join(line for _, line in self.lines())

    def fields(self) -> set[str]:
        """Names of JSON fields or CSV columns in the first 64 KiB; what tells formats apart."""
        head = b""
        for _, line in self.lines():
            head += line[: HEAD_BYTES - len(head)]
            if len(head) >= HEAD_BYTES:
                break
        if head.lstrip()[:1] in (b"{", b"["):
            return {name.decode() for name in _FIELD.findall(head)}
        return set(columns(head.partition(b"\n")[0]))

    def decoded(self, decoder: msgspec.json.Decoder[_Line]) -> Iterator[tuple[int, _Line]]:
        """Every line as the decoder's type."""
        for number, line in self.lines():
            yield number, self.decode(decoder, line, number)

    def decode(self, decoder: msgspec.json.Decoder[_Line], line: bytes, number: int) -> _Line:
        """One line as the decoder's type."""
        try:
            return decoder.decode(line)
        except msgspec.ValidationError as error:
            raise self.fault(number, f"{error}; correct or remove the line") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.fault(
                number, f"not JSON ({error}): is the file cut? Correct or remove the line"
            ) from None

    def _opened(self) -> IO[bytes]:
        with self.path.open("rb") as file:
            packed = file.read(2) == _GZIP
        return cast(IO[bytes], gzip.open(self.path)) if packed else self.path.open("rb")


def columns(header: bytes) -> list[str]:
    """The column names in the first line of a CSV file."""
    text = header.decode("utf-8-sig", errors="replace")
    return [name.strip().strip('"') for name in text.split(",")]
