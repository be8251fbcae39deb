"""The private node of an engine that names none: started by whoever needs it first.

Scheduler and workers may be several processes. They meet at a file named for the engine's id, in
this user's runtime folder; its lock decides who starts the node. The node ends when the pipe its
starter holds closes, however that process ended; a file that nobody removed, the next node's
starter does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
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

from holdfast.config import default_address
from holdfast.errors import ConfigError, HoldfastError, NodeGoneError, RefusedError
from holdfast.wire.address import socket_path
from holdfast.wire.client import Client
from holdfast.wire.messages import PROTOCOL, Hello

READY = "READY "
READY_S = 60.0
ANSWER_S = 2.0
END_S = 10.0

SETTLED_S = 600.0
"""A younger file may be of an engine that still starts; its node may be out of sight (a container
with a /tmp of its own), and its other processes have to find it."""


class PrivateNode:
    """A node for one engine; whoever started it ends it with `close`."""

    def __init__(self, engine_id: str, folder: Path | None = None) -> None:
        """Find the engine's node or start it. Raises HoldfastError if it does not come up."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        folder = folder or Path(socket_path(default_address())).parent
        _own(folder)
        name = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
        self._meeting = folder / f"engine-{name}"
        with _locked(self._meeting) as file:
            self.address = file.read().strip()
            if not self.address or not _answers(self.address):
                _sweep(folder)
                self.address = self._start()
                file.seek(0)
                file.truncate()
                file.write(self.address)

    def close(self) -> None:
        """End the node, if it was started here, and wait until its folder is gone."""
        if self._process is None:
            return
        os.close(self._pipe)
        self._meeting.unlink(missing_ok=True)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> str:
        ours, self._pipe = os.pipe()
        argv = [sys.executable, "-m", "holdfast", "serve", "--private", "--log-level", "warning"]
        self._process = subprocess.Popen(
            [*argv, "--with-parent", str(ours)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[ours],
            start_new_session=True,
        )
        os.close(ours)
        line = _first_line(self._process)
        if not line.startswith(READY):
            self.close()
            raise HoldfastError(
                f"the private node did not start within {READY_S:.0f} s (it said {line!r}, its "
                "errors are above); start one with `holdfast serve` and name it in "
                "kv_connector_extra_config.holdfast"
            )
        return line.removeprefix(READY).strip()


def _own(folder: Path) -> None:
    """Make the folder where the engine's processes meet; raise where others could meddle with it.

    Whoever can write there can have an engine read from a node of his own.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HoldfastError(
            f'other users may change folder "{folder}"; set XDG_RUNTIME_DIR to a folder of your '
            "own, or name a node in kv_connector_extra_config.holdfast"
        )


@contextlib.contextmanager
def _locked(meeting: Path) -> Iterator[TextIO]:
    """Lend the file, made if it is missing, once nobody else has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with os.fdopen(os.open(meeting, flags, 0o600), "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Who waits for a file that is removed would get one that nobody else finds.
            if _is_at(file, meeting):
                yield file
                return


def _is_at(file: TextIO, path: Path) -> bool:
    """Return whether this is the file of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


def _sweep(folder: Path) -> None:
    """Remove the meeting files of engines whose node is gone: they were killed."""
    for meeting in folder.glob("engine-*"):
        with contextlib.suppress(OSError, ValueError, ConfigError):
            _remove_if_left(meeting)


def _remove_if_left(meeting: Path) -> None:
    descriptor = os.open(meeting, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < SETTLED_S:
            return
        # Under the lock: nobody writes an address here before the file is gone.
        if _is_at(file, meeting) and not _listens(file.read().strip()):
            meeting.unlink()


def _listens(address: str) -> bool:
    """Return whether a node is behind an address, however busy it is."""
    if not address:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(socket_path(address))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True
    return True


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """Return what the node prints first, or what there is of it when time is up."""
    said = b""
    until_s = time.monotonic() + READY_S
    if process.stdout is None:
        return ""
    with process.stdout as out:
        while b"\n" not in said:
            readable, _, _ = select.select([out], [], [], max(0.0, until_s - time.monotonic()))
            chunk = os.read(out.fileno(), 4096) if readable else b""
            if not chunk:
                break
            said += chunk
    return said.decode(errors="replace")


def _answers(address: str) -> bool:
    try:
        Client(address, Hello(PROTOCOL, "vllm"), ANSWER_S).close()
    except (NodeGoneError, RefusedError):
        return False
    return True
