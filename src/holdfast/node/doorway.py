"""The node's socket file: its own user gets in, perhaps a group, and one node stands behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import BusyError, ConfigError
from holdfast.wire.address import socket_path

_BACKLOG = 128
_PROBE_S = 1.0


@contextlib.contextmanager
def doorway(address: str, group: int | None = None) -> Iterator[socket.socket]:
    """Lend a bound Unix socket, not yet listening; its file goes when the node goes.

    The socket is for this user, 0600, or for a group as well, 0660. Makes the folder, 0700 or 0750,
    if it is missing. A file that a dead node left is replaced. Raises
    BusyError if a live one is behind it, ConfigError if the place is not safe or not a socket.
    """
    path = Path(socket_path(address))
    _prepare(path.parent, group)
    _check_socket(path)
    with _locked(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _clear(path)
        listener.bind(str(path))
        _open_to(path, group)
        inode = path.stat().st_ino
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def listen(listener: socket.socket) -> None:
    """Let peers connect."""
    listener.listen(_BACKLOG)


def _open_to(path: Path, group: int | None) -> None:
    """Let this user open the socket, and the group if there is one."""
    path.chmod(0o600)
    if group is None:
        return
    try:
        os.chown(path, -1, group)
    except OSError as error:
        raise ConfigError(
            f'socket_group: "{path}" can not be given to group {group}: {error.strerror}; choose '
            "one that the node's user is in"
        ) from error
    path.chmod(0o660)


def _prepare(folder: Path, group: int | None) -> None:
    try:
        made = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if made and group is not None:
            os.chown(folder, -1, group)
            folder.chmod(0o750)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(
            f'listen: folder "{folder}" can not be used: {error.strerror}; choose another'
        ) from error
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.geteuid(), 0) or shared:
        raise ConfigError(
            f'listen: other users may change folder "{folder}"; choose one of your own with '
            "mode 0700"
        )
    passes = found.st_mode & stat.S_IXOTH or (
        found.st_gid == group and found.st_mode & stat.S_IXGRP
    )
    if group is not None and not passes:
        raise ConfigError(
            f'socket_group: group {group} can not enter folder "{folder}"; give it the folder, '
            "with mode 0750"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside the socket, so that two starting nodes can not take turns clearing."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise _busy(path, f"process {holder}") from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _check_socket(path: Path) -> bool:
    """Return whether a socket is there; raise ConfigError for anything else."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(kind):
        raise ConfigError(f'listen: "{path}" is there and is not a socket; choose another path')
    return True


def _clear(path: Path) -> None:
    """Remove what a dead node left."""
    if not _check_socket(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # it does not answer, but somebody holds it open
    raise _busy(path, "another process")


def _busy(path: Path, holder: str) -> BusyError:
    return BusyError(
        f'listen: socket "{path}" is in use by {holder}; stop that, or choose another path'
    )
