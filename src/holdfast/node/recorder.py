"""What engines ask a node, a line a request: a trace that `holdfast sim` and `size` read again.

Lengths, times, and the keys of full blocks, which are keyed hashes: no text can be had from them.
Written by a thread of its own; a disk that can not keep up loses lines, never a request its time.
The form: docs/reference/traces.md.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.blocks.world import World
from holdfast.errors import ConfigError
from holdfast.limits import GIB
from holdfast.wire.messages import Cover

BYTES_MAX = 8 * GIB
"""Where a record ends: some millions of requests."""

_WAITING_MAX = 4_096
_log = logging.getLogger(__name__)


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
        """Open the file, made if it is not there; raise ConfigError if it can not be written."""
        try:
            # Users' names for their sessions are in it, so it is for nobody else.
            fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "ab")
        except OSError as error:
            raise ConfigError(
                f"record: {str(file)!r} can not be written: {error.strerror}; name another file"
            ) from error
        self._left = most_bytes - self._file.tell()
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
        """Write what waits and close the file."""
        self._lines.put(None)
        self._thread.join()
        self._file.close()

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        while (asked := self._lines.get()) is not None:
            line = encoder.encode(asked) + b"\n"
            if len(line) > self._left:
                self.lost += 1
                continue
            try:
                self._file.write(line)
                if self._lines.empty():
                    self._file.flush()
            except OSError as error:
                _log.warning("record: a line is lost: %s", error)
                self.lost += 1
            self._left -= len(line)
