"""What a client makes sure of before it speaks: that nobody else stands behind its node's socket.

Who answers at a path gets to see secrets, and lends memory that an engine reads and writes. So
every folder on the way there must be one in which nobody puts sockets but its owner, root or we
ourselves, up from the root of the file system; and the process that listens must be the owner's.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path

from holdfast.errors import StrangerError

ROOT = 0
UNKNOWN = 65_534
"""Who a user of another namespace is here."""

_LINKS_MAX = 40
_IDS = 1 << 32
_UCRED = struct.Struct("=iII")
_REMEDY = (
    "have the node listen where only its user writes, such as /run/holdfast, mode 0700 or 0750"
)


def owners_of(path: str) -> frozenset[int]:
    """Return the users whose node may listen at a path: the owners of socket and folder.

    Raises StrangerError where others could have put it there, OSError where it is not there.
    """
    names = [*reversed(Path(path).parts[1:])]
    at, above, links = Path("/"), os.lstat("/"), 0
    while names:
        name = names.pop()
        if name == "..":
            at = at.parent
            above = at.lstat()
            continue
        here = at / name
        found = here.lstat()
        _check_entry(here, found, above, is_last=not names)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = here.readlink()
            if target.is_absolute():
                at, above = Path("/"), os.lstat("/")
            names += [part for part in reversed(target.parts) if part != "/"]
        elif names:
            at, above = here, found
        else:
            return frozenset({found.st_uid, above.st_uid})
    raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), path)


def check_listener(connected: socket.socket, path: str, owners: frozenset[int]) -> None:
    """Raise StrangerError unless the other side is a process of the owners, of root, or ours."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, user, _ = _UCRED.unpack(raw)
    if user in owners or user in (os.geteuid(), ROOT) or (user == UNKNOWN and _is_inside()):
        return
    raise StrangerError(
        f'socket "{path}" belongs to user {min(owners)}, and a process of user {user} answers; '
        "find out whose it is, and start the node as the user whose folder it is"
    )


def _check_entry(
    path: Path, found: os.stat_result, above: os.stat_result, *, is_last: bool
) -> None:
    """Raise StrangerError if users may have put an entry into a folder that is not theirs.

    A socket's own folder must be closed to them, as the node wants it to be, unless it is sticky.
    Above it a folder may be open (to a group, or as one that containers share): what is ours or
    root's there nobody else made.
    """
    mode = above.st_mode
    if not mode & (stat.S_IWOTH | stat.S_IWGRP):
        return
    if is_last and not mode & stat.S_ISVTX:
        raise StrangerError(
            f'"{path}": other users may change folder "{path.parent}" (mode '
            f"{stat.S_IMODE(mode):04o}), and so answer in the node's place; {_REMEDY}"
        )
    if found.st_uid not in (os.geteuid(), ROOT):
        makers = "anybody" if mode & stat.S_IWOTH else f"group {above.st_gid}"
        raise StrangerError(
            f'"{path}" belongs to user {found.st_uid}, and {makers} may make it in '
            f'"{path.parent}"; remove it if it is not your node\'s, or {_REMEDY}'
        )


def _is_inside() -> bool:
    """Whether this namespace has names for some of the machine's users only."""
    return int(Path("/proc/self/uid_map").read_text("ascii").split()[-1]) < _IDS - 1
