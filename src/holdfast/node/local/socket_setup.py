"""Create the node's Unix socket: for its own user and perhaps a group, and locked to one node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.address import socket_path
from holdfast.errors import BusyError, ConfigError
from holdfast.wire.local.peer_check import ROOT

_PROBE_S = 1.0


@contextlib.contextmanager
def socket_setup(address: str, group: int | None = None) -> Iterator[socket.socket]:
    """Yield a bound Unix socket that does not listen yet; remove its file on exit.

    The socket's mode is 0600, or 0660 with a group. A missing folder is made, with mode 0700 or
    0750. A socket file of a dead node is replaced. Raises BusyError if a live process uses it,
    ConfigError if other users may change the folder or the path is not a socket.
    """
    path = Path(socket_path(address))
    folder = path.parent
    try:
        made = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if made and group is not None:
            os.chown(folder, -1, group)
            folder.chmod(0o750)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(
            f'listen: folder "{folder}" cannot be used: {error.strerror}; choose another'
        ) from error
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.geteuid(), ROOT) or shared:
        raise ConfigError(
            f'listen: other users may change folder "{folder}"; choose one of your own with '
            "mode 0700"
        )
    passes = found.st_mode & stat.S_IXOTH or (
        found.st_gid == group and found.st_mode & stat.S_IXGRP
    )
    if group is not None and not passes:
        raise ConfigError(
            f'socket_group: group {group} cannot enter folder "{folder}"; give it the folder, '
            "with mode 0750"
        )
    _check_socket(path)
    with _locked(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        if _check_socket(path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_PROBE_S)
                try:
                    probe.connect(str(path))
                    is_stale = False
                except ConnectionRefusedError:
                    is_stale = True
                except OSError:  # it does not answer, but a process holds it open
                    is_stale = False
            if not is_stale:
                raise _busy(path, "another process")
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        if group is not None:
            try:
                os.chown(path, -1, group)
            except OSError as error:
                raise ConfigError(
                    f'socket_group: "{path}" cannot be given to group {group}: {error.strerror}; '
                    "choose one that the node's user is in"
                ) from error
            path.chmod(0o660)
        inode = path.stat().st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside the socket, so that only one starting node replaces the socket."""
    try:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f'listen: socket "{path}" cannot be made: {error.strerror}; choose a folder that you '
            "can write to"
        ) from error
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


def _busy(path: Path, holder: str) -> BusyError:
    return BusyError(
        f'listen: socket "{path}" is in use by {holder}; stop that, or choose another path'
    )
