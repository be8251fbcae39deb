"""Read and replace small files safely: regular files only, of bounded size, without blocking.

Every failure is an OSError: a folder, FIFO, socket or device, a loop of links, too many bytes.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor, not inherited; 0600 if `flags` create it."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_regular(path: Path, bytes_max: int) -> bytes:
    """Return the whole content of a regular file of at most `bytes_max` bytes."""
    with os.fdopen(open_regular(path), "rb") as opened:
        data = opened.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"more than {bytes_max} bytes", str(path))
    return data


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically by one for its owner only; flushed, so that it survives a crash.

    If that fails, the old file stays and nothing of the new one is left.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # left by a process that crashed, or no file at all
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(fd)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
