"""A private node for an engine whose configuration names none.

The engine's scheduler and workers may be several processes. They find the node's address in a file
in this user's runtime folder, named for the engine's id; the process that first locks the file
starts the node. The node ends when the pipe that its starter holds closes, however the starter
ended. If others of the engine's processes go on, such as those of another data-parallel replica,
the first of them that locks the file starts a new node, which is empty. The starter of a later node
removes files that killed engines left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

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

AWAY_S = 5.0
"""How long the node must be away before a new one is started: the replicas of an engine that ends
do not end at the same time."""

RESTART_S = 60.0
"""Minimum time between two starts by one process, so that nodes that fail are not started in turn.
"""

POLL_S = 0.1
"""Interval in which a start looks whether it is not wanted any more."""

ADDRESS_CHARS_MAX = 4096
"""Maximum length of an address that is read from a file."""

STALE_S = 600.0
"""Age below which another engine's address file is not removed. The engine may still be starting,
and its node may be invisible from here (a container with its own /tmp)."""


_log = logging.getLogger(__name__)


class PrivateNode:
    """A node for one engine; the object that started it ends it in `close`.

    `address`: that of the node found or started last. Any thread may call any method.
    """

    def __init__(self, engine_id: str, folder: Path | None = None) -> None:
        """Find the engine's node or start it. Raises HoldfastError if it does not start."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._own: _OwnNode | None = None
        self.address = ""
        self._tried_s = -math.inf
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
        self.address = self._found_or_started()

    def present_address(self, away_s: float) -> str:
        """Return the address of the engine's node; find or start a new one if it has ended.

        `away_s`: how long the caller has not reached the node. For the thread of a connection,
        before each attempt to connect: it may wait `READY_S`. Raises HoldfastError or OSError if a
        new node does not start.
        """
        is_late = away_s >= AWAY_S and not self._closed.is_set()
        if is_late and not _listens(self.address):  # a node that is only slow still listens
            before, self.address = self.address, self._found_or_started()
            if self.address != before:
                _log.warning("the private node has ended; the new one is %s", self.address)
        return self.address

    def close(self) -> None:
        """End the node if this object started it, and wait until its folder is removed."""
        self._closed.set()
        self._end_own()

    def _found_or_started(self) -> str:
        """Return the address in the engine's file, if a node answers there; else start a node.

        Within `RESTART_S` of the last start it keeps the address of the node that has ended.
        """
        with _locked(self._address_file) as file:
            address = file.read(ADDRESS_CHARS_MAX).strip()
            if address and _answers(address):
                return address
            now_s = time.monotonic()
            if now_s - self._tried_s < RESTART_S:
                return self.address
            self._tried_s = now_s
            self._end_own()  # it has ended, or no process of this engine could reach it
            _remove_stale_files(self._address_file.parent)
            address = self._start()
            file.seek(0)
            file.truncate()
            file.write(address)
        return address

    def _start(self) -> str:
        """Start a node, and return its address once it is ready; hold the lock of the file."""
        node = _OwnNode.start()
        try:
            address = node.wait_ready(self._closed)
        except BaseException:
            node.end()
            raise
        with self._lock:
            if not self._closed.is_set():
                self._own = node._replace(address=address)
                return address
        node.end()
        raise HoldfastError("the private node is not wanted any more: its engine has ended")

    def _end_own(self) -> None:
        """End the node that this object started, if any."""
        with self._lock:
            node, self._own = self._own, None
        if node is not None:
            _remove_file_of(node.address, self._address_file)
            node.end()


class _OwnNode(NamedTuple):
    """The process of a node, and the pipe whose end ends it; `address` empty: not ready yet."""

    process: subprocess.Popen[bytes]
    pipe: int
    address: str = ""

    @classmethod
    def start(cls) -> _OwnNode:
        read_end, write_end = os.pipe()
        argv = [sys.executable, "-m", "holdfast", "serve", "--private", "--log-level", "warning"]
        try:
            process = subprocess.Popen(
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
        return cls(process, write_end)

    def wait_ready(self, ends: threading.Event) -> str:
        """Return the node's address. Raises HoldfastError if it is late, or `ends` is set."""
        line = ""
        if self.process.stdout is not None:
            with self.process.stdout as out:
                line = _first_line(out.fileno(), ends)
        if not line.startswith(READY):
            raise HoldfastError(
                f"the private node did not start within {READY_S:.0f} s (its output: {line!r}, its "
                "errors are above); start one with `holdfast serve` and name it in "
                "kv_connector_extra_config.holdfast"
            )
        return line.removeprefix(READY).strip()

    def end(self) -> None:
        """End the node, and wait until its folder is removed."""
        os.close(self.pipe)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _first_line(descriptor: int, ends: threading.Event) -> str:
    """Return what a node writes up to a line's end, within `READY_S` and until `ends` is set."""
    output = b""
    until_s = time.monotonic() + READY_S
    poll = select.poll()  # `select.select` fails for descriptors from 1024 on
    poll.register(descriptor, select.POLLIN)
    while b"\n" not in output and time.monotonic() < until_s and not ends.is_set():
        if poll.poll(1000 * POLL_S):
            chunk = os.read(descriptor, 4096)
            if not chunk:
                break
            output += chunk
    return output.decode(errors="replace")


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


def _remove_file_of(address: str, file: Path) -> None:
    """Remove an address file, unless it has or gets the address of another node."""
    with contextlib.suppress(OSError), _opened(file, os.O_RDWR) as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(opened, file) and opened.read(ADDRESS_CHARS_MAX).strip() == address:
            file.unlink()


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
