"""`holdfast.open`: a store in this process, or the store of a node.

An embedded store is opened on a separate thread, so that no signal handler interrupts the opening.
See docs/decisions/0020-calls-on-threads-of-the-store.md.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import overload

from holdfast.address import UNIX, is_tcp
from holdfast.assemble import open_store as open_configured
from holdfast.client.session import NodeStore
from holdfast.config import DiskOptions, default_address, load, parse
from holdfast.errors import ConfigError
from holdfast.store.call_threads import OwnThreadCalls
from holdfast.store.store import CLOSE_STOP_S, CLOSE_WRITE_S, Store
from holdfast.tiers.disk.kind import FILE_NAME

HOST_DEFAULT = "256 MiB"
"""Host memory of an embedded store if only a disk tier is given."""

ABANDONED_S = CLOSE_WRITE_S + CLOSE_STOP_S
"""Longest time that an opening waits for an earlier one whose caller was interrupted."""

_CHECK_S = 0.5
"""The caller's wait returns to Python code this often, where signal handlers can run."""

_running: set[Opening] = set()
_numbers = itertools.count()
_log = logging.getLogger(__name__)


@overload
def open_store(
    file: str = "",
    *,
    host: str | int | None = None,
    disk: str | int | None = None,
    path: str | None = None,
) -> Store: ...
@overload
def open_store(file: str, *, domain: str) -> NodeStore: ...
def open_store(
    file: str = "",
    *,
    host: str | int | None = None,
    disk: str | int | None = None,
    path: str | None = None,
    domain: str | None = None,
) -> Store | NodeStore:
    """Open a store: embedded in this process, or that of a node of this machine.

    `file` is a configuration file for an embedded store, or the address of a node,
    `unix:///path/node.sock`. Without it, the store is embedded: `host` and `disk` are capacities
    ("8 GiB" or bytes), and `path` is the folder of the disk tier, needed with `disk`. Without any
    of them, the defaults for this machine are taken, and logged the first time. `domain` is the
    domain of a node's sessions, by default "default". Use the store in a `with` block; the sessions
    of both kinds have the same methods and outcomes.

    A thread opens an embedded store while the caller waits. If an exception interrupts the caller
    (Ctrl-C, a signal handler that raises), that thread closes the store.

    Raises ConfigError for arguments that cannot be combined, BusyError for a folder in use, and
    NodeGoneError if no node answers.
    """
    if is_tcp(file):
        raise ConfigError(
            f"open: {file} is the address of a target, which serves other nodes; name the "
            f"{UNIX} socket of a node on this machine"
        )
    if file.startswith(UNIX):
        if not host is disk is path is None:
            raise ConfigError(
                f"open: {file} is a node, which has its own tiers; omit host, disk and path"
            )
        return NodeStore(file, "default" if domain is None else domain)
    if domain is not None:
        raise ConfigError(
            "open: domain needs the address of a node; pass the domain of an embedded store to "
            "store.session(fingerprint, domain)"
        )
    return Opening(partial(_open_here, file, host, disk, path)).result()


def _open_here(
    file: str, host: str | int | None, disk: str | int | None, path: str | None
) -> Store:
    if host is None and disk is None and path is None:
        config = load(file)
        if not file:
            disks = [tier for tier in config.tiers if isinstance(tier, DiskOptions)]
            if disks and not any(Path(disk.path, FILE_NAME).exists() for disk in disks):
                _log.warning(
                    "no capacity given: taking %s of memory, and %s of disk in %s; give others as "
                    'holdfast.open(host="8 GiB", disk="64 GiB", path="/var/lib/holdfast")',
                    config.host_bytes,
                    disks[0].capacity,
                    disks[0].path,
                )
        return open_configured(config, OwnThreadCalls())
    if file:
        raise ConfigError("open: give a file or sizes, not both")
    if (disk is None) != (path is None):
        raise ConfigError(
            "open: disk and path go together; give the disk tier's capacity and its folder, or "
            "neither"
        )
    if path == "":
        raise ConfigError("open: path is empty; name the folder of the disk tier")
    tiers: list[dict[str, object]] = [
        {"kind": "host", "capacity": HOST_DEFAULT if host is None else host}
    ]
    if disk is not None:
        tiers.append({"kind": "disk", "path": path, "capacity": disk})
    config = parse({"listen": default_address(), "tiers": tiers})
    return open_configured(config, OwnThreadCalls())


class Opening:
    """One call of `holdfast.open`: the caller waits in `result` for the thread that runs `work`."""

    def __init__(self, work: Callable[[], Store]) -> None:
        self._work = work
        self._number = next(_numbers)
        self._done = threading.Lock()
        self._done.acquire()
        self._answered: SimpleQueue[None] = SimpleQueue()
        """Receives an item when the caller has returned or raised."""
        self._abandoned = self._over = False
        self._store: Store | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-open", daemon=True)

    def result(self) -> Store:
        """Return the store, or raise what `work` raises; call once.

        After an exception in this call the store is closed in the background. Later openings of
        this process wait until it is closed, because it may have locked the same folder.
        """
        try:
            self._thread.start()
            while not self._done.acquire(timeout=_CHECK_S):
                continue
            store = self._store
            if store is None:
                error, self._error = self._error, None
                raise error or AssertionError("neither a store nor an error")
            self._answered.put(None)
            return store
        except BaseException:
            self._abandoned = True
            self._answered.put(None)
            if self._over and self._store is not None:
                self._store.close()  # the thread ended before `_abandoned` was set
            raise

    def wait_closed(self, later: Opening) -> None:
        """Wait until this opening ends, if its caller abandoned it and it began before `later`.

        An opening waits for earlier ones only, so that no two wait for each other.
        """
        if self._number < later._number and self._is_abandoned():
            self._thread.join(ABANDONED_S)

    def _is_abandoned(self) -> bool:
        return self._abandoned

    def _run(self) -> None:
        _running.add(self)
        try:
            for other in list(_running):
                other.wait_closed(self)
            if self._is_abandoned():
                return
            try:
                store = self._store = self._work()
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                self._error = error
                self._done.release()
                return
            self._done.release()
            self._answered.get()
            self._over = True
            if self._is_abandoned():
                store.close()
        finally:
            _running.discard(self)
