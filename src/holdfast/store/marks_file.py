"""The file of durable marks: a log of marks that were added and removed.

It is read once, at the start, and rewritten when it has grown to several times its content. A
record with the time 0 removes marks.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.blocks.key import unpack_keys
from holdfast.regular_file import open_regular, read_regular, replacing
from holdfast.store.durable_marks import MarkedBlocks

FILE_BYTES_MAX = 64 << 20

GROWTH_MAX = 4
"""The file is rewritten when it has this many times the size of the last rewrite, and at least
`_SMALL_BYTES`."""

_SMALL_BYTES = 1 << 20

_WAITING_BYTES_MAX = 1 << 20
"""Keys of changes, in bytes, that wait while the file cannot be written."""

_MAGIC = b"HFDURAB1"
_FRAME = struct.Struct("<II")
"""Length and CRC-32 of the record that follows."""

_log = logging.getLogger("holdfast.store")


class MarksFile:
    """The file of durable marks; without a path, marks end with the process. Thread-safe.

    What cannot be written is written with the next change; until then a crash loses those marks,
    not the blocks. After changes of `_WAITING_BYTES_MAX`, the file is rewritten with all marks.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._waiting: list[MarkedBlocks] = []
        self._nbytes = 0
        self._rewrite_at = _SMALL_BYTES
        self._has_failed = False
        self._must_rewrite = False
        """Whether changes were left out that only a rewritten file has."""
        self._is_wrong = False
        """Whether the next `save` must write all marks; set without the lock."""

    def load(self) -> list[MarkedBlocks]:
        """Return the records of an earlier process, up to the first that is damaged."""
        if self._path is None:
            return []
        try:
            data = read_regular(self._path, FILE_BYTES_MAX)
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("%s: durable marks cannot be read: %s; ignored", self._path, error)
            return []
        runs, self._nbytes = _records(data)
        if self._nbytes < len(data):  # a crash in the middle of a write, or damage
            _log.warning(
                "%s: the last %d bytes are damaged: durable marks in them are lost",
                self._path,
                len(data) - self._nbytes,
            )
            self._nbytes = 0  # the next change rewrites the file
        return runs

    def rewrite(self) -> None:
        """Write all marks at the next `save`, because the file has other ones.

        Returns at once, also while a `save` waits for a drive that hangs.
        """
        self._is_wrong = True

    def save(self, changes: Sequence[MarkedBlocks], rest: Callable[[], list[MarkedBlocks]]) -> bool:
        """Append changes, flushed; return whether the file has all that was given so far.

        `rest` returns every mark, if the file is to be rewritten.
        """
        path = self._path
        if path is None:
            return True
        with self._mutex:
            self._waiting += changes
            if self._is_wrong:
                self._is_wrong, self._must_rewrite = False, True
            if not self._waiting and not self._must_rewrite:
                return True
            try:
                self._write(path, rest)
            except OSError as error:
                if not self._has_failed:
                    _log.warning("%s: durable marks were not saved: %s", path, error)
                self._has_failed = True
                if sum(len(run.keys) for run in self._waiting) > _WAITING_BYTES_MAX:
                    self._waiting.clear()
                    self._must_rewrite = True
                return False
            self._has_failed = self._must_rewrite = False
            self._waiting.clear()
            return True

    def _write(self, path: Path, rest: Callable[[], list[MarkedBlocks]]) -> None:
        data = b"".join(map(_record, self._waiting))
        is_small = self._nbytes and self._nbytes + len(data) <= self._rewrite_at
        if is_small and not self._must_rewrite:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT)
            try:
                if os.fstat(fd).st_size == self._nbytes:
                    if os.pwrite(fd, data, self._nbytes) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(fd)
                    self._nbytes += len(data)
                    return
            finally:
                os.close(fd)
        whole = _MAGIC + b"".join(map(_record, rest()))
        self._nbytes = 0
        with replacing(path) as fd, os.fdopen(fd, "wb", closefd=False) as opened:
            opened.write(whole)
        self._nbytes = len(whole)
        self._rewrite_at = min(max(_SMALL_BYTES, GROWTH_MAX * len(whole)), FILE_BYTES_MAX)


def _record(run: MarkedBlocks) -> bytes:
    data = msgspec.msgpack.encode(run)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _records(data: bytes) -> tuple[list[MarkedBlocks], int]:
    """Return the whole records of a file, and how many leading bytes of it they take."""
    if not data.startswith(_MAGIC):
        return [], 0
    runs, at = list[MarkedBlocks](), len(_MAGIC)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            break
        try:
            run = msgspec.msgpack.decode(body, type=MarkedBlocks)
            unpack_keys(run.keys)
        except (msgspec.MsgspecError, ValueError):
            break
        runs.append(run)
        at += _FRAME.size + length
    return runs, at
