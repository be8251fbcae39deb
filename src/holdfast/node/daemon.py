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
import stat
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from holdfast.address import is_tcp
from holdfast.assemble import node_credentials, open_store
from holdfast.assemble.keys import check_descriptors
from holdfast.buffers import keep_memory_from_dumps
from holdfast.config import Config
from holdfast.config.options import changed_options, kind_of
from holdfast.errors import BusyError, ConfigError
from holdfast.node.http.pages import NodePages
from holdfast.node.http.server import HttpServer
from holdfast.node.local.recorder import RequestRecorder
from holdfast.node.local.server import NodeServer
from holdfast.node.local.sessions import NodeContext, open_session
from holdfast.node.local.socket_setup import socket_setup
from holdfast.node.local.threads import NodeThreads
from holdfast.node.local.users import group_of, users_of
from holdfast.node.recent import RecentRequests
from holdfast.node.registration import register, until_drained
from holdfast.node.remote.server import EntryRules, TargetServer, address_of, bind
from holdfast.node.remote.service import NodeAddresses, TargetLimits, TargetService
from holdfast.node.remote.token_keys import TokenKeys
from holdfast.node.traces import open_traces
from holdfast.regular_file import check_regular
from holdfast.tiers.kind import BUILT_IN
from holdfast.version import __version__
from holdfast.wire.remote import nixl
from holdfast.wire.remote.credentials import ServerTls
from holdfast.wire.remote.expiry import credential_states

NO_PARENT = -1
_SWITCH_S = 0.0005
"""The interpreter's switch interval: short, so that threads returning from I/O get the GIL soon."""

ENGINE_BACKLOG = 128
"""Connections of engines that the kernel keeps until they are accepted."""

HTTP_TOKEN_BYTES_MIN = 16
HTTP_TOKEN_BYTES_MAX = 4_096

_CLOSE_WRITE_S = 60.0
"""Time for the last writes at close; the terminal or service manager can end the node sooner."""

_log = logging.getLogger(__name__)


def serve(
    config: Config, ready: Callable[[Sequence[str]], None], *, parent_fd: int = NO_PARENT
) -> None:
    """Serve until SIGTERM, SIGINT, or the other end of the pipe `parent_fd` closes.

    Calls `ready` with the addresses once peers can connect; recovery of the disk tiers continues in
    the background. Raises ConfigError, FormatError or BusyError before that.
    """
    keep_memory_from_dumps()
    check_descriptors(config)
    sys.setswitchinterval(_SWITCH_S)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a connection needs two descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tokens = config.tokens
    token_keys = TokenKeys(tokens).current if tokens.key_file else None
    tls = ServerTls(config.tls) if config.tls else None
    check_expiry(config)
    entry, users = EntryRules(tls, token_keys, any_user=config.open), users_of(config)
    with contextlib.ExitStack() as undo:
        listeners = [undo.enter_context(bind(address)) for address in config.target_addresses]
        local = config.node_address
        listener = undo.enter_context(socket_setup(local, group_of(config))) if local else None
        addresses = [*([local] if local else []), *map(address_of, listeners)]
        http = None
        if config.http.listen:
            try:
                over_tcp = is_tcp(config.http.listen)
                setup = bind(config.http.listen) if over_tcp else socket_setup(config.http.listen)
                http = undo.enter_context(setup)
            except (ConfigError, BusyError) as error:  # they begin with "listen: "
                raise type(error)(f"http.{error}") from error
        token = http_token(config)
        traces = open_traces(config.traces)
        _log.info("holdfast %s, process %d, at %s", __version__, os.getpid(), " ".join(addresses))
        log_tiers(config)
        if traces is not None:
            undo.callback(traces.close)
            _log.info("traces to %s", config.traces.endpoint)
        store = open_store(config)
        undo.callback(store.close, _CLOSE_WRITE_S)
        recorder = RequestRecorder(Path(config.record)) if config.record else None
        if recorder is not None:
            undo.callback(recorder.close)
        recent = RecentRequests()
        limits = TargetLimits(connections=config.target_connections)
        service = TargetService(store, limits, _addresses(config, listeners))
        if listeners and nixl.wanted(config.transport):
            threading.Thread(target=service.offer_nixl, name="holdfast-nixl", daemon=True).start()
        for bound in listeners:
            target = TargetServer(bound, service, entry)
            target.start()
            undo.callback(target.close)
        if http is not None:
            undo.callback(_serve_http(http, config, token, NodePages(store, service, recent)).close)
        until: Callable[[asyncio.Event], Awaitable[object]] = asyncio.Event.wait
        if config.register:
            entry_in_pool = register(config.register, list(map(address_of, listeners)))
            undo.callback(entry_in_pool.close)
            until = partial(
                until_drained,
                store=store,
                entry=entry_in_pool,
                drain_s=config.register.drain_s,
            )
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
        with contextlib.suppress(ImportError):
            new_loop = importlib.import_module("uvloop").new_event_loop
        with asyncio.Runner(loop_factory=new_loop) as runner:
            shared = NodeContext(
                store, NodeThreads(), users, recorder, traces, service.node_status, recent
            )
            runner.run(_run(listener, shared, lambda: ready(addresses), parent_fd, until))
    _log.info("closed")


def check_expiry(config: Config) -> None:
    """Warn of credentials that expire soon, or that a host cannot use now.

    Raises ConfigError for a target whose certificate or CA is not valid now: no host could connect.
    """
    for state in credential_states(node_credentials(config)):
        if state.trouble and config.target_addresses and state.setting.startswith("tls."):
            raise ConfigError(f"{state.setting}: {state.file!r}: {state.trouble}")
        if state.trouble or state.soon:
            why = state.trouble or state.period
            _log.warning("%s: %r: %s", state.setting, state.file, why)


def _serve_http(
    listener: socket.socket, config: Config, token: bytes, pages: NodePages
) -> HttpServer:
    """Serve metrics and status; on TCP, clients without a token must be of this node's user."""
    any_user = token or config.http.open or not is_tcp(config.http.listen)
    check_client = None if any_user else pages.check_client
    server = HttpServer(
        listener, pages.routes(), token, check_client=check_client, deny=pages.deny
    ).start()
    _log.info("metrics and status at %s", config.http.listen)
    return server


def notify(address: str, state: str) -> None:
    """Send a service state to systemd's notification socket; do nothing without an address."""
    if not address:
        return
    address = "\0" + address[1:] if address.startswith("@") else address
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        contextlib.suppress(OSError),
    ):
        sender.sendto(state.encode(), address)


def log_tiers(config: Config) -> None:
    """Log each tier, with its options if the kind is built in: others may hold a secret."""
    for name, tier in zip(config.tier_names, config.tiers, strict=True):
        values = ", ".join(f"{option} {value}" for option, value in changed_options(tier))
        if (kind := kind_of(tier)) not in ("host", *BUILT_IN):
            values = f"of the installed kind {kind}"
        _log.info("tier %s: %s", name, values or "default options")


def http_token(config: Config) -> bytes:
    """Return the secret that readers of metrics and status present; empty if there is none.

    Raises ConfigError if its file cannot be read, is open to all users, or is too short or long.
    """
    file = config.http.token_file
    if not file:
        return b""
    try:
        check_regular(Path(file))
        with Path(file).open("rb") as opened:
            exposed = os.fstat(opened.fileno()).st_mode & stat.S_IRWXO
            token = opened.read(HTTP_TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"http.token_file: {file!r} cannot be read: {error.strerror}; name a file with the "
            "secret"
        ) from error
    if exposed:
        raise ConfigError(f"http.token_file: {file!r} is open to all users; chmod 640 it")
    if len(token) > HTTP_TOKEN_BYTES_MAX:
        raise ConfigError(
            f"http.token_file: {file!r} holds more than {HTTP_TOKEN_BYTES_MAX} bytes, the maximum; "
            "make one with `openssl rand -hex 32`"
        )
    token = token.strip()
    if len(token) < HTTP_TOKEN_BYTES_MIN:
        raise ConfigError(
            f"http.token_file: {file!r} holds {len(token)} bytes, the minimum is "
            f"{HTTP_TOKEN_BYTES_MIN}; make one with `openssl rand -hex 32`"
        )
    return token


def _addresses(config: Config, listeners: Sequence[socket.socket]) -> NodeAddresses:
    page = config.http.listen if is_tcp(config.http.listen) else ""
    return NodeAddresses(config.node_address, [*map(address_of, listeners)], page)


async def _run(
    listener: socket.socket | None,
    context: NodeContext,
    ready: Callable[[], None],
    parent_fd: int,
    until: Callable[[asyncio.Event], Awaitable[object]],
) -> None:
    """Serve engines on `listener`, if there is one, while `until` waits.

    A signal or the parent's end sets the event that `until` waits for.
    """
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)

    def look_for_parent() -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(parent_fd, 64):
                loop.remove_reader(parent_fd)
                over.set()

    if parent_fd != NO_PARENT:
        os.set_blocking(parent_fd, False)
        loop.add_reader(parent_fd, look_for_parent)
    if listener is None:
        ready()
        await until(over)
        return
    server = NodeServer(listener, partial(open_session, context))
    listener.listen(ENGINE_BACKLOG)
    serving = loop.create_task(server.serve())
    ready()
    await until(over)
    _log.info("closing connections=%d", server.connections)
    serving.cancel()
    server.close()
    await loop.run_in_executor(None, context.threads.close)
