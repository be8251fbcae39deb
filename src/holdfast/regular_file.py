"""Read small regular files without blocking, and replace files atomically.

Every failure is an OSError: a folder, FIFO, socket or device, a loop of links, too many bytes, a
path that cannot be one. Reading a FIFO would wait for a writer, and a device may have no end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK_REST_S = 0.02

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def check_regular(path: Path) -> None:
    """Raise OSError, which names the kind, for anything that is not a regular file."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a path ({error})", ascii(str(path))) from error
    _check_mode(path, mode)


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor, not inherited.

    If `flags` create it, it gets `mode`.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno in (errno.ENXIO, errno.EISDIR):
            check_regular(path)  # a socket, or a FIFO to write to that has no reader
        raise
    try:
        _check_mode(path, os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
        raise OSError(errno.EINVAL, f"not a regular file, but {kind}", str(path))


def read_regular(path: Path, bytes_max: int) -> bytes:
    """Return the whole content of a regular file of at most `bytes_max` bytes."""
    with os.fdopen(open_regular(path), "rb") as opened:
        data = opened.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"more than {bytes_max} bytes", str(path))
    return data


def file_stamp(path: str) -> tuple[int, ...]:
    """Return what changes when a regular file is replaced or written to; empty for any other."""
    try:
        found = Path(path).stat()
    except OSError:
        return ()
    if not stat.S_ISREG(found.st_mode):  # a pipe changes whenever it is read
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file by one for its owner only with these bytes; see `replacing`."""
    with replacing(path) as fd, os.fdopen(fd, "wb", closefd=False) as opened:
        opened.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Replace a file atomically by the one that the `with` block writes to this descriptor.

    The new file is for its owner only, unless the block gives it another mode. File and folder are
    flushed, so that the new file survives a crash. After an error the old file stays and nothing of
    the new one is left. If several threads or processes replace a file, the last one wins.
    """
    fd, new = _create_beside(path)
    try:
        yield fd
        os.fsync(fd)
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    flush_folder(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file, if it exists, so that it stays away after a crash."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):  # the folder is gone, and the file with it
        flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, if it does not exist. New ones survive a crash."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # it may be written to, and not be listed
            flush_folder(each.parent)


def flush_folder(path: str | Path) -> None:
    """Flush the entries of a folder; a file system may not know this call (EINVAL, ENOTSUP)."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


@contextlib.contextmanager
def locked_beside(path: Path, wait_s: float, mode: int = 0o600) -> Iterator[None]:
    """Hold the lock file beside a file that several processes read, change and replace.

    The lock file, `path` and ".lock", stays. Raises TimeoutError, which names it, if another
    process holds the lock for `wait_s` seconds, another OSError if it cannot be created.
    """
    lock = path.with_name(path.name + ".lock")
    fd = open_regular(lock, os.O_RDWR | os.O_CREAT, mode)
    until = time.monotonic() + wait_s
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                raise TimeoutError(
                    f"another process has held {str(lock)!r} for {wait_s:g} s; nothing was "
                    "changed; find out why it waits"
                )
            time.sleep(_LOCK_REST_S)
        yield
    finally:
        # Unlock explicitly: a child that this process forked may have a copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _create_beside(path: Path) -> tuple[int, Path]:
    """Create a locked file with a name of its own; remove those of processes that crashed."""
    prefix = f".{path.name}.new-"
    for left in path.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):  # it is in use, or another process removes it
            fd = open_regular(left, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                os.close(fd)
    while True:
        fd, new = tempfile.mkstemp(prefix=prefix, dir=path.parent)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, Path(new)
        os.close(fd)  # another process removed it before it was locked
