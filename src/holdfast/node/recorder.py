"""What engines ask a node, a line a request: a trace that `holdfast sim` and `size` read again.

Lengths, times, and the keys of full blocks, which are keyed hashes: no text can be had from them.
Written by a thread of its own; a disk that can not keep up loses lines, never a request its time.
The form: docs/reference/traces.md.
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

from holdfast.blocks.world import World
from holdfast.errors import ConfigError
from holdfast.limits import GIB, KIB, MIB
from holdfast.prepared import prepared
from holdfast.wire.messages import Cover

BYTES_MAX = 8 * GIB
"""Where a record ends: some millions of requests."""

_WAITING_MAX = 4_096
_TAILS = (64 * KIB, 64 * MIB)
"""How far from its end a file is searched for its last line; no line is as long as the second."""
_BEGIN = b'{"at_s":'
_log = logging.getLogger(__name__)


@prepared
class Asked(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request as it came: when, in which world, how long, its blocks' keys in hexadecimal."""

    at_s: float
    fingerprint: str
    tokens: int
    keys: list[str]
    session: str = ""


def asked_of(request: Cover, world: World, keys: Sequence[bytes], at_s: float) -> Asked:
    """Return what to write down of a request that came at `at_s`, in Unix seconds."""
    tokens = request.tokens or len(keys) * world.block_tokens
    named = [key.hex() for key in keys]
    return Asked(at_s, world.fingerprint.hex(), tokens, named, request.session)


class Recorder:
    """Appends to one file. Any thread; `close` writes what waits."""

    def __init__(self, file: Path, most_bytes: int = BYTES_MAX) -> None:
        """Open the file, made if it is not there; raise ConfigError if it can not be written.

        A last line that was cut short, by a full disk or a power cut, goes: no trace has such.
        """
        try:
            # Users' names for their sessions are in it, so it is for nobody else.
            fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "ab", buffering=0)
            self._torn = not _mend(file, fd)
        except OSError as error:
            raise ConfigError(
                f"record: {str(file)!r} can not be written: {error.strerror}; name another file"
            ) from error
        self._left = most_bytes - os.fstat(fd).st_size
        self._lines: queue.Queue[Asked | None] = queue.Queue(_WAITING_MAX)
        self.lost = 0
        """Lines that found no room."""
        self._thread = threading.Thread(target=self._write, name="holdfast-record", daemon=True)
        self._thread.start()

    def note(self, asked: Asked) -> None:
        """Record a request, if the disk keeps up."""
        try:
            self._lines.put_nowait(asked)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write what waits and close the file. What the disk says to that is logged."""
        self._lines.put(None)
        self._thread.join()
        try:
            self._file.close()
        except OSError as error:
            _log.warning("record: lines may be lost, the file did not close: %s", error)

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        while (asked := self._lines.get()) is not None:
            line = b"\n" * self._torn + encoder.encode(asked) + b"\n"
            if len(line) > self._left:
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
        """Write a line whole, or raise OSError with what came of it taken away again."""
        fd, done = self._file.fileno(), 0
        start = os.fstat(fd).st_size
        try:
            while done < len(line):
                done += os.write(fd, memoryview(line)[done:])
        except OSError:
            if done:
                torn, self._torn = self._torn, True
                with contextlib.suppress(OSError):  # not a file: the next begins a line of its own
                    os.ftruncate(fd, start)
                    self._torn = torn
            raise


def _mend(file: Path, fd: int) -> bool:
    """Take away what a torn line left at a record's end; False if a line has to be begun there.

    That is so behind a line that only lacks its end, and behind what is not ours. Raises OSError.
    """
    size = os.fstat(fd).st_size
    if not size:
        return True
    with file.open("rb") as reader:
        for back in _TAILS:
            reader.seek(max(size - back, 0))
            _, newline, tail = reader.read(back).rpartition(b"\n")
            if newline:
                break
    if not tail:
        return True
    from_start = bool(newline) or len(tail) == size
    if not (from_start and _is_torn(tail)):
        return False
    os.ftruncate(fd, size - len(tail))
    return True


def _is_torn(tail: bytes) -> bool:
    """Whether this, without an end, is the beginning of a line of ours, or zeros in its place."""
    if not tail.strip(b"\0"):
        return True
    begun = min(len(tail), len(_BEGIN))
    if tail[:begun] != _BEGIN[:begun]:
        return False
    try:
        msgspec.json.decode(tail, type=Asked)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False
