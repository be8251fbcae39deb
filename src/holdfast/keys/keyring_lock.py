"""The lock on a key ring's file: one process at a time changes the ring."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import RefusedError

LOCK_S = 10.0
"""Longest wait for the lock."""
_LOCK_REST_S = 0.02


@contextlib.contextmanager
def held_for_change(path: Path | None) -> Iterator[None]:
    """Hold the lock on the file, so that no other process changes it; without a path, do nothing.

    Raises RefusedError if another process holds the lock for LOCK_S, or it cannot be created.
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
        _acquire(fd, lock)
        yield
    finally:
        # Unlock explicitly, because a child that was forked meanwhile has a copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def unwritable(path: Path, error: OSError) -> RefusedError:
    """Return the error for a ring's file, or its lock, that cannot be written."""
    return RefusedError(
        f"keyring: {str(path)!r} cannot be written: {error.strerror}; nothing was changed; make "
        "its folder writable for this user"
    )


def _acquire(fd: int, lock: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise RefusedError(
                    f"keyring: another process has held {str(lock)!r} for {LOCK_S:g} s; nothing "
                    "was changed; find out why it waits"
                ) from None
            time.sleep(_LOCK_REST_S)
        else:
            return
