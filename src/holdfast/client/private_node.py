"""A private node for an engine whose configuration names none.

The engine's scheduler and workers may be several processes. They find the node's address in a file
in this user's runtime folder, named for the engine's id; the process that first locks the file
starts the node. The node ends when the pipe that its starter holds closes, however the starter
ended. The starter of a later node removes files that killed engines left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from holdfast.address import UNIX, socket_path
from holdfast.config import default_address
from holdfast.errors import (
    ConfigError,
    HoldfastError,
    NodeGoneError,
    ProtocolError,
    RefusedError,
)
from holdfast.regular_file import open_regular
from holdfast.wire.local.client import Client
from holdfast.wire.local.messages import PROTOCOL, Hello

READY = "READY "
"""What a private node prints before its address when it is ready."""

READY_S = 60.0
"""Timeout of a node's start."""

ANSWER_S = 2.0
"""Timeout of a connection to a node that may have ended."""

END_S = 10.0
"""Time for a node to end by itself before it is killed."""

ADDRESS_CHARS_MAX = 4096
"""Maximum length of an address that is read from a file."""

STALE_S = 600.0
"""Age below which another engine's address file is not removed. The engine may still be starting,
and its node may be invisible from here (a container with its own /tmp)."""


_log = logging.getLogger(__name__)


class PrivateNode:
    """A node for one engine; the object that started it ends it in `close`."""

    def __init__(self, engine_id: str, folder: Path | None = None) -> None:
        """Find the engine's node or start it. Raises HoldfastError if it does not start."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        folder = folder or Path(default_address().removeprefix(UNIX)).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        # A user with write access could make an engine use another node.
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HoldfastError(
                f'other users may change folder "{folder}"; set XDG_RUNTIME_DIR to a folder of '
                "your own, or name a node in kv_connector_extra_config.holdfast"
            )
        name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
        self._address_file = folder / f"engine-{name}"
        with _locked(self._address_file) as file:
            self.address = file.read(ADDRESS_CHARS_MAX).strip()
            if not self.address or not _answers(self.address):
                _remove_stale_files(folder)
                self.address = self._start()
                file.seek(0)
                file.truncate()
                file.write(self.address)

    def close(self) -> None:
        """End the node if this object started it, and wait until its folder is removed."""
        if self._process is None:
            return
        os.close(self._pipe)
        self._address_file.unlink(missing_ok=True)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> str:
        read_end, write_end = os.pipe()
        argv = [sys.executable, "-m", "holdfast", "serve", "--private", "--log-level", "warning"]
        try:
            self._process = subprocess.Popen(
                [*argv, "--with-parent", str(read_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                pass_fds=[read_end],
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._pipe = write_end
        output = b""
        until_s = time.monotonic() + READY_S
        if self._process.stdout is not None:
            with self._process.stdout as out:
                poll = select.poll()  # `select.select` fails for descriptors from 1024 on
                poll.register(out, select.POLLIN)
                while b"\n" not in output:
                    left_s = max(0.0, until_s - time.monotonic())
                    chunk = os.read(out.fileno(), 4096) if poll.poll(1000 * left_s) else b""
                    if not chunk:
                        break
                    output += chunk
        line = output.decode(errors="replace")
        if not line.startswith(READY):
            self.close()
            raise HoldfastError(
                f"the private node did not start within {READY_S:.0f} s (its output: {line!r}, its "
                "errors are above); start one with `holdfast serve` and name it in "
                "kv_connector_extra_config.holdfast"
            )
        return line.removeprefix(READY).strip()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[TextIO]:
    """Open and lock an address file, creating it if it is missing; yield it."""
    while True:
        try:
            unlocked = _opened(file, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise HoldfastError(
                f'"{file}", the file with the address of this engine\'s node, cannot be used: '
                f"{error.strerror}; remove it"
            ) from error
        with unlocked as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            # If the file was removed while this process waited for the lock, open the new one.
            if _is_at(opened, file):
                yield opened
                return


def _is_at(opened: TextIO, path: Path) -> bool:
    """Return whether `path` is the name of an open file."""
    try:
        return os.path.samestat(os.fstat(opened.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _remove_stale_files(folder: Path) -> None:
    """Remove the address files of killed engines, whose nodes are gone."""
    for file in folder.glob("engine-*"):
        with (
            contextlib.suppress(OSError, ValueError, ConfigError),
            _opened(file, os.O_RDWR) as opened,
        ):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(opened.fileno())
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < STALE_S:
                continue
            # The lock prevents that another process writes an address before the file is removed.
            if _is_at(opened, file) and not _listens(opened.read(ADDRESS_CHARS_MAX).strip()):
                file.unlink()


def _opened(file: Path, flags: int) -> TextIO:
    """Open an address file, which must not be a symbolic link."""
    descriptor = open_regular(file, flags | os.O_NOFOLLOW)
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")


def _listens(address: str) -> bool:
    """Return whether a node listens at an address, even if it is too busy to answer."""
    if not address:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(socket_path(address))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            pass
    return True


def _answers(address: str) -> bool:
    try:
        Client(address, Hello(PROTOCOL, "engine"), ANSWER_S).close()
    except (NodeGoneError, RefusedError):
        return False
    except (ConfigError, ProtocolError, ValueError) as error:
        _log.warning("the stored address of this engine's node is ignored: %s", error)
        return False
    return True
