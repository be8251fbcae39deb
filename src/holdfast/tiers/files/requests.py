"""Requests to the process that makes all calls on one shared folder, and its answers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from holdfast.prepared import prepared


@prepared
class FolderSettings(msgspec.Struct, frozen=True):
    """The shared folder of a process.

    `filesystem`: type that the file system of the folder must have, as in /proc/mounts; empty if
    any will do. `process`: unique name of the process, part of the names of its temporary files.
    """

    path: str
    filesystem: str
    process: str


class ReadPiece(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Read `nbytes` of a file from byte `start` to offset `at` of the shared memory.

    `ahead`: bytes behind these that the next requests of the lane read; the file stays open for
    them. The answer's code is the number of bytes, fewer than wanted at the end of the file.
    """

    name: str
    start: int
    nbytes: int
    at: int
    ahead: int


class WritePiece(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Write `nbytes` from offset `at` of the shared memory to byte `start` of a new file.

    Byte 0 begins a new temporary file of the lane, `Publish` gives it its name.
    """

    name: str
    start: int
    nbytes: int
    at: int


class Publish(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Flush the lane's temporary file and give it its name."""

    name: str


class ListNames(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """List the files below a folder, given by its name; "" for all.

    The answer's code is the length of the names as text, one a line. Its first `nbytes` are at
    offset `at` of the shared memory; `MoreNames` brings the rest.
    """

    prefix: str
    at: int
    nbytes: int


class DeleteNames(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Delete files; one that does not exist is deleted already."""

    names: list[str]


class ProbeFolder(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Find out how the file system behaves; the answer has a `FolderReport`.

    Makes the folder if its parent exists, and registers this machine there.
    """


class ExamineFolder(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Find out the same, and leave everything as it was."""


class MoreNames(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Copy `nbytes` of the lane's last listing, from byte `start`, to the shared memory."""

    start: int
    at: int
    nbytes: int


FolderRequest: TypeAlias = (
    ReadPiece
    | WritePiece
    | Publish
    | ListNames
    | DeleteNames
    | ProbeFolder
    | ExamineFolder
    | MoreNames
)


class FolderReport(msgspec.Struct, frozen=True):
    """What a file system did when it was probed, and its mount.

    `not_published`: files of `tried` that were not whole when opened right after their rename. The
    other results are words: "kept" if a promise of POSIX was kept, or what happened instead.
    `same_host_name`: other machines that used the folder under this machine's host name.
    """

    filesystem: str
    source: str
    mount_point: str
    options: str
    is_local: bool
    free_bytes: int
    total_bytes: int
    tried: int
    not_published: int
    rename_over: str
    exclusive_create: str
    lock: str
    attributes: str
    host_name: str
    same_host_name: int


class FolderAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a request: a number >= 0, or a negated error number, with words for a log."""

    code: int
    why: str = ""
    report: FolderReport | None = None


REQUESTS: msgspec.msgpack.Decoder[FolderRequest] = msgspec.msgpack.Decoder(FolderRequest)
ANSWERS = msgspec.msgpack.Decoder(FolderAnswer)
