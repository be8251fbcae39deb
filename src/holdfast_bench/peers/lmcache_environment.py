"""LMCache in a folder of its own, as its tests use it: without the packages that need CUDA.

LMCache requires packages that exist for CUDA only, and other versions of some than the project.
Its server on a CPU imports none of these. So LMCache is installed alone in a folder that is kept
between runs (60 MB), and a process finds it there by `PYTHONPATH`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from holdfast.errors import HoldfastError

VERSION = "0.5.6"
"""The version of LMCache with which the binding is tested."""

INSTALL_S = 600.0
"""Maximum duration of the installation."""

VARIABLES = {"LMCACHE_TRACK_USAGE": "false"}

_DONE = "holdfast-installed"
"""File that marks a complete folder."""


def folder() -> Path:
    """Return the folder of LMCache, which may not exist."""
    return Path.home() / ".cache" / "holdfast" / "engines" / f"lmcache-{VERSION}"


def installed() -> bool:
    """Whether the folder is complete."""
    return (folder() / _DONE).exists()


def variables(*paths: Path) -> dict[str, str]:
    """Return variables of a process that imports LMCache, and what these folders have."""
    return VARIABLES | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, folder()]))}


def make_importable() -> None:
    """Let this process import LMCache from the folder, behind its own packages, if it is there."""
    if installed() and str(folder()) not in sys.path:
        sys.path.append(str(folder()))


def install() -> None:
    """Make the folder complete, in seconds; other processes wait meanwhile.

    Raises HoldfastError with the end of pip's output if it fails.
    """
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed():
            return
        argv = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target"]
        done = subprocess.run(
            [*argv, str(place), f"lmcache=={VERSION}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_S,
            check=False,
        )
        if done.returncode:
            end = "\n".join(done.stdout.decode(errors="replace").splitlines()[-20:])
            raise HoldfastError(f"installing LMCache failed:\n{end}")
        (place / _DONE).touch()


if __name__ == "__main__":
    install()
