"""Check that a socket belongs to the expected node before a client sends anything to it.

The process at a socket receives secrets, and shares memory that an engine reads and writes. So in
every folder of the path, from the root of the file system, only the folder's owner, root and this
user may create entries, and the listening process must belong to the owner, root or this user.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import UntrustedPeerError

ROOT = 0
_LINKS_MAX = 40
_OVERFLOW_UID = 65_534
"""The kernel's default for `overflowuid`."""

_ALL_IDS = (1 << 32) - 1
"""The number of user ids; the last one means no user."""

_UCRED = struct.Struct("=iII")
_REMEDY = (
    "have the node listen in a folder that only its user can write to, such as /run/holdfast, mode "
    "0700 or 0750"
)


class ConnectedPeer(NamedTuple):
    """Process and user id of a peer, from the kernel; `pid` is 0 for another pid namespace."""

    pid: int
    uid: int


def peer_of(connected: socket.socket) -> ConnectedPeer:
    """Return the process at the other end of a Unix socket. Raises OSError."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return ConnectedPeer(pid, uid)


def is_unmapped(user: int) -> bool:
    """Return whether an id stands for users that this process's user namespace does not map.

    The kernel reports one id, `overflowuid`, for all of them. If every user is mapped, that id is
    an ordinary user. Raises OSError if the mapping cannot be read.
    """
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))
    except OSError:
        overflow = _OVERFLOW_UID
    if user != overflow:
        return False
    lines = Path("/proc/self/uid_map").read_text("ascii").splitlines()
    return sum(int(line.split()[2]) for line in lines) < _ALL_IDS


def owners_of(path: str) -> frozenset[int]:
    """Return the users whose node may listen at a path: the owners of socket and folder.

    Raises UntrustedPeerError if another user may have created it, OSError if it does not exist.
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
        found, mode = here.lstat(), above.st_mode
        if mode & (stat.S_IWOTH | stat.S_IWGRP):
            # The socket's own folder must not be writable for other users, unless it is sticky. A
            # folder above it may be (for a group, or shared by containers), if this user or root
            # owns the entry.
            if not names and not mode & stat.S_ISVTX:
                raise UntrustedPeerError(
                    f'"{here}": other users may change folder "{at}" (mode '
                    f"{stat.S_IMODE(mode):04o}), so another process may answer for the node; "
                    f"{_REMEDY}"
                )
            if found.st_uid not in (os.geteuid(), ROOT):
                writers = "every user" if mode & stat.S_IWOTH else f"group {above.st_gid}"
                raise UntrustedPeerError(
                    f'"{here}" belongs to user {found.st_uid}, and {writers} may create it in '
                    f'"{at}"; remove it if it is not your node\'s, or {_REMEDY}'
                )
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


def check_listener(user: int, path: str, owners: frozenset[int]) -> None:
    """Raise UntrustedPeerError unless the listener's user is an owner, root or this user."""
    if user in owners or user in (os.geteuid(), ROOT):
        return
    if is_unmapped(user):  # may be the owner, whose id this user namespace cannot tell
        return
    raise UntrustedPeerError(
        f'socket "{path}" belongs to user {min(owners)}, and a process of user {user} answers; '
        "find out whose process it is, and start the node as the owner of the folder"
    )
