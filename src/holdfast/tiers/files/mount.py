"""The mount that holds a path: its type, source and options, from /proc/self/mountinfo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_ESCAPE = re.compile(r"\\([0-7]{3})")

_LOCAL = frozenset(
    {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
"""Types of file systems that only one machine mounts."""


class Mount(NamedTuple):
    """A mounted file system; `options` are those of the mount and of the file system."""

    mount_point: str
    filesystem: str
    source: str
    options: str

    @property
    def is_local(self) -> bool:
        """Whether it is of a type that only this machine mounts."""
        return self.filesystem in _LOCAL


def find_mount(path: str, mountinfo: str | None = None) -> Mount:
    """Return the mount that holds an absolute path, without access to its file system (proc(5)).

    `mountinfo`: the text of the kernel's table, by default that of this process.
    """
    table = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    found = Mount("/", "unknown", "unknown", "")
    for line in table.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields, types = mount.split(" "), filesystem.split(" ")
        point = _unescaped(fields[4])
        holds = path == point or path.startswith(point.rstrip("/") + "/")
        # Of mounts at one point, the last one covers the others.
        if holds and len(point) >= len(found.mount_point):
            options = ",".join([fields[5], *types[2:3]])
            found = Mount(point, types[0], _unescaped(types[1]), options)
    return found


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
