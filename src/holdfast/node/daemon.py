"""The node's process: socket, store and sessions from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.assemble import open_store
from holdfast.assemble.keys import check_descriptors, read_key
from holdfast.assemble.registration import register
from holdfast.config import Config
from holdfast.node.doorway import doorway, listen
from holdfast.node.recorder import Recorder
from holdfast.node.registered import Registered
from holdfast.node.sessions import House, NodeSession
from holdfast.node.target import Entry, TargetServer, address_of, bind
from holdfast.node.target_service import Service
from holdfast.node.threads import Threads
from holdfast.node.users import Users, group_of, users_of
from holdfast.store.store import Store
from holdfast.wire import nixl
from holdfast.wire.credentials import TlsFiles, server_context
from holdfast.wire.messages import Hello
from holdfast.wire.server import Answering, Peer, Server

NO_PARENT = -1
_SWITCH_S = 0.0005
"""Threads that come back from I/O get the interpreter sooner; this process is ours to tune."""

_log = logging.getLogger(__name__)


class Door(NamedTuple):
    """Where engines come in, which users may, and who writes down what they ask; None: nobody."""

    listener: socket.socket
    users: Users
    recorder: Recorder | None


def serve(
    config: Config, ready: Callable[[Sequence[str]], None], *, parent_fd: int = NO_PARENT
) -> None:
    """Serve until SIGTERM, SIGINT, or the other end of the pipe `parent_fd` closes.

    Calls `ready` with the addresses once peers can connect; what earlier nodes left on disk is
    found again meanwhile.
    Raises ConfigError, FormatError or BusyError before that, with nothing changed.
    """
    check_descriptors(config)
    sys.setswitchinterval(_SWITCH_S)
    _allow_descriptors()
    entry, users = _entry(config), users_of(config)
    with contextlib.ExitStack() as undo:
        doors = [undo.enter_context(bind(address)) for address in config.target_addresses]
        local = config.node_address
        listener = undo.enter_context(doorway(local, group_of(config))) if local else None
        addresses = [*([local] if local else []), *map(address_of, doors)]
        store = open_store(config)
        undo.callback(store.close)
        recorder = Recorder(Path(config.record)) if config.record else None
        if recorder is not None:
            undo.callback(recorder.close)
        service = Service(store)
        undo.callback(service.close)
        if doors and nixl.wanted(config.transport):
            threading.Thread(target=service.offer_nixl, name="holdfast-nixl", daemon=True).start()
        for door in doors:
            target = TargetServer(door, service, entry)
            target.start()
            undo.callback(target.close)
        registered = None
        if config.register:
            entry_in_pool = register(config.register, list(map(address_of, doors)))
            undo.callback(entry_in_pool.close)
            registered = Registered(store, entry_in_pool, config.register.drain_s)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            engines = Door(listener, users, recorder) if listener else None
            runner.run(_run(store, engines, lambda: ready(addresses), parent_fd, registered))
    _log.info("closed")


def notify(address: str, state: str) -> None:
    """Tell systemd, if it asked, how the service is doing."""
    if not address:
        return
    address = "\0" + address[1:] if address.startswith("@") else address
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        contextlib.suppress(OSError),
    ):
        sender.sendto(state.encode(), address)


def _entry(config: Config) -> Entry:
    """Return what other nodes must show here."""
    tls, tokens = config.tls, config.tokens
    key = read_key(Path(tokens.key_file), "tokens.key_file") if tokens.key_file else b""
    return Entry(server_context(TlsFiles(tls.cert, tls.key, tls.ca)) if tls else None, key)


async def _run(
    store: Store,
    door: Door | None,
    ready: Callable[[], None],
    parent_fd: int,
    registered: Registered | None,
) -> None:
    over = asyncio.Event()
    _end_with(over, parent_fd)
    ended = registered.until(over) if registered else over.wait()
    if door is None:
        ready()
        await ended
        return
    loop = asyncio.get_running_loop()
    threads = Threads()
    house = House(store, threads, door.users, door.recorder)

    def welcome(hello: Hello, peer: Peer) -> Answering:
        return NodeSession(house, hello, peer)

    server = Server(door.listener, welcome)
    listen(door.listener)
    serving = loop.create_task(server.serve())
    ready()
    await ended
    _log.info("closing connections=%d", server.counters.connections)
    serving.cancel()
    server.close()
    await loop.run_in_executor(None, threads.close)


def _end_with(over: asyncio.Event, parent_fd: int) -> None:
    """Set `over` when this process is told to end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    if parent_fd != NO_PARENT:
        _watch(parent_fd, over)


def _watch(parent_fd: int, over: asyncio.Event) -> None:
    """End with the process that holds the other end of this pipe."""
    loop = asyncio.get_running_loop()
    os.set_blocking(parent_fd, False)

    def look() -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(parent_fd, 64):
                loop.remove_reader(parent_fd)
                over.set()

    loop.add_reader(parent_fd, look)


def _allow_descriptors() -> None:
    """Raise this process's limit of open files to what the system allows: two a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's where it is installed."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop]
        factory = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return factory
