"""Record the requests of engines, one a line, as a trace for `holdfast sim` and `holdfast size`.

A line holds length, time, and the keys of full blocks. Keys are keyed hashes: they do not reveal
the text. A background thread writes; if the disk cannot keep up, lines are lost and no request
waits. Format: docs/reference/traces.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.blocks.namespace import Namespace
from holdfast.errors import ConfigError
from holdfast.limits import GIB, KIB, MIB
from holdfast.prepared import prepared
from holdfast.regular_file import open_regular
from holdfast.wire.local.messages import Cover

BYTES_MAX = 8 * GIB
"""Size at which recording stops: some millions of requests."""

_MAX_QUEUED_LINES = 4_096
_TAIL_BYTES = (64 * KIB, 64 * MIB)
"""Distances from the end to search for the last line; every line is shorter than the second."""
_LINE_START = b'{"at_s":'
_log = logging.getLogger(__name__)


@prepared
class RecordedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: its time, namespace, length and block keys in hexadecimal."""

    at_s: float
    fingerprint: str
    tokens: int
    keys: list[str]
    session: str = ""


def recorded(
    request: Cover, namespace: Namespace, keys: Sequence[bytes], at_s: float
) -> RecordedRequest:
    """Return the record of a request that arrived at `at_s`, in Unix seconds."""
    named = [key.hex() for key in keys]
    fingerprint = namespace.fingerprint.hex()
    return RecordedRequest(at_s, fingerprint, request.tokens, named, request.session)


class RequestRecorder:
    """Appends records to one file. Any thread may call it; `close` writes the queued lines."""

    def __init__(self, file: Path, most_bytes: int = BYTES_MAX) -> None:
        """Open or create the file; raise ConfigError if it cannot be written.

        An incomplete last line, left by a full disk or a power cut, is removed.
        """
        try:
            # Mode 0600, because the file contains users' names for their sessions.
            fd = open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(fd, "ab", buffering=0)
            self._torn = not _remove_torn_line(file, fd)
        except OSError as error:
            raise ConfigError(
                f"record: {str(file)!r} cannot be written: {error.strerror}; name another file"
            ) from error
        self._most_bytes = most_bytes
        self._left = max(0, most_bytes - os.fstat(fd).st_size)
        """Bytes until the size limit; negative once a line did not fit and recording has ended."""
        self._lines: queue.Queue[RecordedRequest | None] = queue.Queue(_MAX_QUEUED_LINES)
        self.lost = 0
        """Number of requests that were not recorded."""
        self._thread = threading.Thread(target=self._write, name="holdfast-record", daemon=True)
        self._thread.start()

    def note(self, request: RecordedRequest) -> None:
        """Record a request, if the disk keeps up."""
        try:
            self._lines.put_nowait(request)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write the queued lines and close the file. Logs errors, and how many lines were lost."""
        self._lines.put(None)
        self._thread.join()
        if self.lost:
            _log.warning("record: %d requests were not recorded", self.lost)
        try:
            self._file.close()
        except OSError as error:
            _log.warning("record: lines may be lost, the file did not close: %s", error)

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        while (request := self._lines.get()) is not None:
            line = b"\n" * self._torn + encoder.encode(request) + b"\n"
            if len(line) > self._left:
                if self._left >= 0:
                    _log.warning(
                        "record: the file has reached its limit of %d bytes; requests are not "
                        "recorded any more, until the node is started with another file",
                        self._most_bytes,
                    )
                self._left = -1
                self.lost += 1
                continue
            try:
                self._append(line)
            except OSError as error:
                _log.warning("record: a line is lost: %s", error)
                self.lost += 1
            else:
                self._torn = False
                self._left -= len(line)

    def _append(self, line: bytes) -> None:
        """Write a whole line, or remove the written part and raise OSError."""
        fd, done = self._file.fileno(), 0
        start = os.fstat(fd).st_size
        try:
            while done < len(line):
                done += os.write(fd, memoryview(line)[done:])
        except OSError:
            if done:
                torn, self._torn = self._torn, True
                with contextlib.suppress(OSError):  # e.g. a pipe: `_torn` starts a new line next
                    os.ftruncate(fd, start)
                    self._torn = torn
            raise


def _remove_torn_line(file: Path, fd: int) -> bool:
    """Truncate a torn last line; return False if the next record must begin with a newline.

    It must after a complete record without a newline, and after foreign text. Raises OSError.
    """
    size = os.fstat(fd).st_size
    if not size:
        return True
    with file.open("rb") as reader:
        for back in _TAIL_BYTES:
            reader.seek(max(size - back, 0))
            _, newline, tail = reader.read(back).rpartition(b"\n")
            if newline:
                break
    if not tail:
        return True
    if not newline and len(tail) != size:
        return False
    if tail.strip(b"\0"):  # zeros may stand in place of a record
        begun = min(len(tail), len(_LINE_START))
        if tail[:begun] != _LINE_START[:begun]:
            return False
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            msgspec.json.decode(tail, type=RecordedRequest)
            return False
    os.ftruncate(fd, size - len(tail))
    return True
