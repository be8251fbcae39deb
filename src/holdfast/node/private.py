"""The folder of a private node: gone with the node, and swept by the next one if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "holdfast-private-"
_SETTLED_S = 60.0
"""A younger folder may belong to a node that has not locked it yet."""


@contextlib.contextmanager
def private_folder(parent: str) -> Iterator[str]:
    """Lend a fresh 0700 folder below `parent`; removes those that killed nodes left there."""
    _sweep(Path(parent))
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.geteuid()}-", dir=parent)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _SETTLED_S:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(fd)
