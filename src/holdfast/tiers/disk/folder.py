"""The folder of a disk tier: whether it is still the one that was opened, and may be used.

A drive that is unmounted leaves an empty folder on the file system below it. A tier that took this
folder for an empty drive would fill the wrong file system. So a folder that was below a mount point
is used again only while something is mounted there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.tiers.disk.kind import FILE_NAME

_NAMES_SHOWN = 3

_BESIDE = (
    "lock", "default.key", "keyring.json", "keyring.json.lock", "learnt.json", "drops.json",
    "durable.log", "gates", "audit.jsonl", "lost+found",
)  # fmt: skip
"""What an empty folder may have: small files of a node beside its blocks, and what a new file
system has in its root."""


class FileIdentity(NamedTuple):
    """Device and inode numbers of the file with a tier's blocks."""

    device: int
    inode: int


def mount_point(path: str) -> str:
    """Return the mount point above a path: the nearest folder at which a file system is mounted."""
    folder = Path(os.path.realpath(path))
    return str(next(each for each in (folder, *folder.parents) if os.path.ismount(each)))


def file_identity(path: str) -> FileIdentity:
    """Return the identity of the file in a tier's folder; raise OSError."""
    found = Path(path, FILE_NAME).stat()
    return FileIdentity(found.st_dev, found.st_ino)


def why_not_same(path: str, opened: FileIdentity) -> str:
    """Return why the file in a tier's folder is not the one that was opened; empty if it is."""
    try:
        found = file_identity(path)
    except OSError as error:
        return f'"{Path(path, FILE_NAME)}": {error.strerror}'
    if found == opened:
        return ""
    what = "file" if found.device == opened.device else "device"
    return f'"{path}" is on another {what} than before'


def check_usable(path: str, setting: str, mounted_at: str) -> None:
    """Raise ConfigError unless a tier may format its file in a folder, or has one there.

    It may in a folder that is empty or does not exist, while something is mounted at `mounted_at`.
    """
    if not os.path.ismount(mounted_at):
        raise ConfigError(
            f'{setting}.path: nothing is mounted at "{mounted_at}"; mount the drive, or name '
            "another folder: holdfast tier replace NAME --path FOLDER"
        )
    try:
        names = sorted(each.name for each in Path(path).iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f'{setting}.path: "{path}" cannot be listed: {error.strerror}; mount the drive, or '
            "name another folder: holdfast tier replace NAME --path FOLDER"
        ) from error
    if FILE_NAME in names:
        return
    foreign = [name for name in names if not _is_beside(name)]
    if foreign:
        shown = ", ".join(foreign[:_NAMES_SHOWN])
        more = f" and {len(foreign) - _NAMES_SHOWN} more" if len(foreign) > _NAMES_SHOWN else ""
        raise ConfigError(
            f'{setting}.path: "{path}" is not empty and has no blocks of Holdfast: {shown}{more}; '
            "empty it, or name another folder: holdfast tier replace NAME --path FOLDER"
        )


def _is_beside(name: str) -> bool:
    """Return whether an empty folder may have a file of this name, or an unfinished one of it."""
    names = (FILE_NAME, *_BESIDE)
    unfinished = any(name.startswith(f".{each}.new-") for each in names)
    return unfinished or name in _BESIDE or name == f"{FILE_NAME}.new"
