"""Probe a shared folder: what its file system does, and how it is mounted.

The files of a probe lie in a folder of their own, which is used as a tier uses its root, and is
deleted at the end. One mount shows only a part: what a writer on another host changes may be seen
later than the probe shows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable

from holdfast.tiers.files.mount import find_mount
from holdfast.tiers.files.requests import FolderReport
from holdfast.tiers.files.shared_folder import FolderDraft, FolderReader, SharedFolder, write_whole

_PUBLISHED = 8
"""Files that are written, renamed and opened at once."""

_PUBLISHED_BYTES = 256 << 10

_REPLACED = 8
"""Times that a name is replaced while it is open and read."""

_NAMES_CREATED, _CREATORS = 5, 6
"""Names that are created exclusively, and threads that create each at once."""

_PROBE_S = 2.0
"""Longest wait for one probe that the tier does not depend on, in seconds."""

KEPT = "kept"
"""A promise of POSIX that held in the probe."""

_HOSTS = "holdfast.hosts"
"""Folder in the root with one empty file for each machine that used it."""

_MULTICAST = 1 << 40
"""Bit of a made-up hardware address, which `uuid.getnode` returns if there is no other."""


def probe_folder(folder: SharedFolder, process: str) -> FolderReport:
    """Make the folder a tier's, and return what its file system does.

    Raises OSError if the folder cannot be used at all.
    """
    folder.check_root()
    _register_host(folder.path)
    return _probe(folder.path, folder.path, process)


def examine_folder(folder: SharedFolder, process: str) -> FolderReport:
    """Return what the folder's file system does, and leave everything as it was.

    If the folder does not exist, its parent is probed, where a tier makes it. Raises OSError if the
    folder cannot be used at all.
    """
    return _probe(folder.path, folder.existing_root(), process)


def _probe(path: str, root: str, process: str) -> FolderReport:
    """Probe the file system of `root`, in a folder there; `path` is the tier's folder."""
    mount = find_mount(os.path.abspath(root))  # noqa: PTH100  # resolves no link
    space = os.statvfs(root)
    scratch = f"{root}/.probe-{process}"
    os.mkdir(scratch)  # noqa: PTH102
    try:
        not_published = _count_not_published(scratch, process)
        rename_over = _words(lambda: _replace_open_file(scratch))
        exclusive_create = _words(lambda: _create_exclusively(scratch))
        lock = _words(lambda: _lock_twice(scratch))
        attributes = _words(lambda: _set_attribute(scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return FolderReport(
        filesystem=mount.filesystem,
        source=mount.source,
        mount_point=mount.mount_point,
        options=mount.options,
        is_local=mount.is_local,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        tried=_PUBLISHED,
        not_published=not_published,
        rename_over=rename_over,
        exclusive_create=exclusive_create,
        lock=lock,
        attributes=attributes,
        host_name=socket.gethostname(),
        same_host_name=_others_of_this_name(path),
    )


def _count_not_published(scratch: str, process: str) -> int:
    """Publish files as a tier does; return how many were not whole when read right afterwards."""
    folder = SharedFolder(scratch, "", process)
    draft, reader, bad = FolderDraft(folder), FolderReader(folder), 0
    for number in range(_PUBLISHED):
        name = f"probe/{process}-{number}"
        data = bytes([number + 1]) * _PUBLISHED_BYTES
        draft.write(name, 0, memoryview(data))
        draft.publish(name)
        into = bytearray(_PUBLISHED_BYTES)
        try:
            reader.read(name, 0, memoryview(into))
        except OSError:
            bad += 1
        else:
            bad += into != data
        folder.delete(name)
    return bad


def _replace_open_file(scratch: str) -> str:
    """Rename files over one name; read it by a descriptor opened before, and by name."""
    path, length = f"{scratch}/name", 1 << 16
    for number in range(_REPLACED):
        old, new = bytes([number]) * length, bytes([number + 1]) * length
        if not number:
            write_whole(path, old)
        held = os.open(path, os.O_RDONLY)
        try:
            write_whole(f"{path}.new", new)
            os.rename(f"{path}.new", path)  # noqa: PTH104
            try:
                if os.pread(held, length, 0) != old:
                    return "an open file changes when its name is replaced"
            except OSError as error:
                return f"an open file is lost when its name is replaced ({_code(error)})"
        finally:
            os.close(held)
        fd = os.open(path, os.O_RDONLY)
        try:
            found = os.pread(fd, length, 0)
        finally:
            os.close(fd)
        if found != new:
            return "old content is read by name" if found == old else "torn content is read"
    return KEPT


def _create_exclusively(scratch: str) -> str:
    """Create names with `O_EXCL` from several threads at once; each must have one winner."""
    wrong = 0
    for number in range(_NAMES_CREATED):
        won: list[int] = []
        start = threading.Barrier(_CREATORS)

        def create(path: str, start: threading.Barrier, won: list[int]) -> None:
            start.wait()
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                won.append(1)

        arguments = f"{scratch}/created-{number}", start, won
        creators = [
            threading.Thread(target=create, args=arguments, name="holdfast-probe")
            for _ in range(_CREATORS)
        ]
        for creator in creators:
            creator.start()
        for creator in creators:
            creator.join()
        wrong += len(won) != 1
    return f"{wrong} of {_NAMES_CREATED} names were created twice" if wrong else KEPT


def _lock_twice(scratch: str) -> str:
    """Lock a file by two descriptors; the second lock must be refused."""
    path = f"{scratch}/lock"
    write_whole(path, b"")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return KEPT
        return "granted twice"
    finally:
        os.close(first)
        os.close(second)


def _set_attribute(scratch: str) -> str:
    """Set an extended attribute, and read it back."""
    path = f"{scratch}/attribute"
    write_whole(path, b"")
    os.setxattr(path, "user.holdfast", b"1")
    return KEPT if os.getxattr(path, "user.holdfast") == b"1" else "lost"


def _register_host(root: str) -> None:
    """Register this machine under its host name, if it has a hardware address."""
    name = _host_and_machine()
    if not name:
        return
    folder = f"{root}/{_HOSTS}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)  # noqa: PTH102
    if name not in os.listdir(folder):  # noqa: PTH208
        write_whole(f"{folder}/{name}", b"")


def _others_of_this_name(root: str) -> int:
    """Return how many other machines were registered under the host name of this one."""
    own = _host_and_machine()
    host = own.partition("-")[0]
    names = []
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(f"{root}/{_HOSTS}")  # noqa: PTH208
    return sum(bool(own) and name.startswith(f"{host}-") and name != own for name in names)


def _host_and_machine() -> str:
    """Return hashes of the host name and of a hardware address; empty without an address."""
    node = uuid.getnode()
    if node & _MULTICAST:
        return ""
    return f"{_hash(socket.gethostname())}-{_hash(f'{node:012x}')}"


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _words(probe: Callable[[], str]) -> str:
    """Return the result of one probe, or why it has none.

    A server of NFS 4 that has just started answers no lock for as long as its clients may reclaim
    theirs, 90 s by default; the tier does not wait for that.
    """
    result = f"no answer within {_PROBE_S:.0f} s"

    def run() -> None:
        nonlocal result
        try:
            result = probe()
        except OSError as error:
            result = f"not supported ({_code(error)})"

    thread = threading.Thread(target=run, name="holdfast-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return result


def _code(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))
