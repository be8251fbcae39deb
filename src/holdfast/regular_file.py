"""Read small files safely: regular files only, of bounded size, without blocking on a FIFO.

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
