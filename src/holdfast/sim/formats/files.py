"""The files of a trace: one file, a folder or a tar archive; plain or compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, cast

from holdfast.errors import TraceError

_TRACE = re.compile(r"\.(jsonl?|csv|log)(\.(gz|xz|bz2))?$")

_NO_TRACE = "no .json, .jsonl, .csv or .log file"
_SUFFIXES = ", plain or compressed (.gz, .xz, .bz2); name a trace"

_TAR_MAGIC = slice(257, 262), b"ustar"
_UNREADABLE = {
    b"PK\x03\x04": "a zip archive; unpack it, and give the folder",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; decompress it with `zstd -d`",
}
"""First bytes of formats that the standard library of each supported Python does not read."""


class TraceFile(NamedTuple):
    """One file of a trace: its name for messages, and a function that opens it."""

    name: str
    opened: Callable[[], IO[bytes]]


def trace_files(path: Path, opened: ExitStack) -> list[TraceFile]:
    """Return the files of a path; those of a folder or archive are in the order of their names.

    An archive is unpacked into a temporary file, which `opened` closes and so deletes. Raises
    TraceError if the path cannot be read, or if a folder or archive has no trace.
    """
    try:
        if path.is_dir():
            files = [file for file in sorted(path.iterdir()) if _TRACE.search(file.name)]
            if not files:
                raise TraceError(f"{path}: {_NO_TRACE} in this folder{_SUFFIXES}")
            return [TraceFile(str(file), partial(_open, file)) for file in files]
        with path.open("rb") as file, readable(str(path), file) as content:
            head = content.read(512)
            if head[_TAR_MAGIC[0]] != _TAR_MAGIC[1]:
                return [TraceFile(str(path), partial(_open, path))]
            unpacked = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # it is one
            unpacked.write(head)
            shutil.copyfileobj(content, unpacked)
        unpacked.seek(0)
        return _members(path, opened.enter_context(tarfile.open(fileobj=unpacked)))
    except tarfile.TarError as error:
        raise TraceError(f"{path}: the archive is damaged ({error}); fetch it again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _members(path: Path, archive: tarfile.TarFile) -> list[TraceFile]:
    """Return the traces in an archive; its only file is one whatever its name."""
    members = sorted((m for m in archive.getmembers() if m.isreg()), key=lambda m: m.name)
    if len(members) > 1:
        members = [m for m in members if _TRACE.search(m.name)]
    if not members:
        raise TraceError(f"{path}: {_NO_TRACE} in this archive{_SUFFIXES}")

    def opened(member: tarfile.TarInfo) -> IO[bytes]:
        content = archive.extractfile(member)
        assert content is not None, "a regular file"  # noqa: S101
        return content

    return [TraceFile(f"{path}/{member.name}", partial(opened, member)) for member in members]


@contextmanager
def readable(
    name: str, file: IO[bytes], line: Callable[[], int] = lambda: 0
) -> Iterator[IO[bytes]]:
    """Decompress a file, if its first bytes say that it is compressed, for a `with` block.

    Raises TraceError if the data ends early or is damaged; `line` returns the line to name.
    """
    magic = file.read(6)
    file.seek(0)
    for start, what in _UNREADABLE.items():
        if magic.startswith(start):
            raise TraceError(f"{name}: {what}")
    kind, content = "", file
    if magic.startswith(b"\x1f\x8b"):
        kind, content = "gzip", cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    elif magic.startswith(b"\xfd7zXZ\x00"):
        kind, content = "xz", lzma.LZMAFile(file)  # noqa: SIM115  # holds nothing but the file
    elif magic.startswith(b"BZh"):
        kind, content = "bzip2", bz2.BZ2File(file)
    try:
        yield content
    except EOFError:
        what = f"the {kind} data ends early: the file is truncated; fetch it again"
    except (zlib.error, lzma.LZMAError) as error:
        what = f"the {kind} data is damaged ({error}); fetch the file again"
    except OSError as error:
        if error.errno is not None:
            raise
        what = f"the {kind} data is damaged ({error}); fetch the file again"
    else:
        return
    raise TraceError(f"{_at(name, line())}: {what}")


def _at(name: str, line: int) -> str:
    return f"{name}:{line}" if line else name
