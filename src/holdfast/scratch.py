"""Temporary folders of a process: removed at its end, or by a later process if it was killed.

Private nodes, benches, demos and campaigns take temporary disk space here. The owner holds a lock
(flock) on its folder, which the kernel releases when the owner ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NODE = "holdfast-private"
"""Prefix of the folders of private nodes."""

RUN = "holdfast-run"
"""Prefix of the folders of benches, demos and campaigns."""

_UNLOCKED_S = 60.0
"""A new folder has a temporary name until it is locked; older ones of such a name are removed."""


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a folder of mode 0700 in `parent`, and remove it at the end of the `with` block.

    First removes this user's folders with this prefix whose owners are gone. Raises OSError if the
    folder cannot be created.
    """
    own = f"{prefix}-{os.geteuid()}-"
    new = f".new-{own}"
    _sweep(parent, own, 0.0)
    _sweep(parent, new, _UNLOCKED_S)
    made = Path(tempfile.mkdtemp(prefix=new, dir=parent))
    fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # The folder gets its name after its lock, so that no other process removes it.
        folder = made.rename(parent / f"{own}{made.name.removeprefix(new)}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


def _sweep(parent: Path, prefix: str, age_s: float) -> None:
    """Remove this user's folders of a prefix and an age whose owners are gone."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, or another process removes it
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                if found.st_uid == os.geteuid() and time.time() - found.st_mtime >= age_s:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(fd)
