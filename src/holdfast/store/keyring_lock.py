"""The lock on a key ring's file: of several processes that share it, one changes it at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import RefusedError

LOCK_S = 10.0
_LOCK_REST_S = 0.02


@contextlib.contextmanager
def held_for_change(path: Path | None) -> Iterator[None]:
    """Keep other processes from changing the file meanwhile; nothing to do where there is none.

    Raises RefusedError where somebody keeps the lock for long, or it can not be made.
    """
    if path is None:
        yield
        return
    lock = path.with_name(path.name + ".lock")
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        _take(fd, lock)
        yield
    finally:
        os.close(fd)


def unwritable(path: Path, error: OSError) -> RefusedError:
    """Return what to say where the ring's file or the lock on it can not be written."""
    return RefusedError(
        f"keyring: {str(path)!r} can not be written: {error.strerror}; nothing was changed; make "
        "its folder writable for this user"
    )


def _take(fd: int, lock: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise RefusedError(
                    f"keyring: another process has held {str(lock)!r} for {LOCK_S:g} s; nothing "
                    "was changed; see what it waits for"
                ) from None
            time.sleep(_LOCK_REST_S)
        else:
            return
