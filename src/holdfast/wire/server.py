"""The node's side of the wire: framing, limits and backpressure; what to answer is a session's.

Each connection says hello within a deadline, as one plain coroutine that may pass a descriptor
along; from then on a buffered protocol receives straight into the frame reader. A peer that asks
too much at once is not read from until answers went out; one that sends garbage is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol, cast

from holdfast.errors import HoldfastError, ProtocolError, RefusedError
from holdfast.limits import CONNECTIONS_MAX, HANDSHAKE_S, IN_FLIGHT_MAX
from holdfast.wire.frame import CONNECTION_ID, FrameReader, encode, request_reader
from holdfast.wire.messages import PROTOCOL, Hello, Refused, Reply, Request, Welcome

USER_SHARE = 0.25
"""How many of the connections another user than the node's may have."""

_UCRED = struct.Struct("=iII")
_log = logging.getLogger(__name__)


class Peer(NamedTuple):
    """Who is on the other end, as the kernel says; `pid` 0 if it is out of our sight."""

    pid: int
    uid: int


class Answering(Protocol):
    """What one connection talks to. All calls come from the event loop's thread."""

    welcome: Welcome
    arena_fd: int | None

    def answer(self, request: Request) -> Reply | Awaitable[Reply]:
        """Return the reply at once, or an awaitable where it takes I/O or long computing.

        HoldfastError becomes a refusal with its message.
        """
        ...

    def ended(self) -> None:
        """Called once, when the connection is over: take everything back."""
        ...


Welcoming = Callable[[Hello, Peer], Answering]
"""Open a session or raise HoldfastError, whose message the peer is shown."""


class Counters:
    """What the wire has seen since start; plain integers."""

    def __init__(self) -> None:
        self.connections = 0
        self.accepted = 0
        self.refused = 0
        self.protocol_errors = 0
        self.requests = 0


class Server:
    """Accepts connections on a listening Unix socket, which it takes over."""

    def __init__(
        self,
        listener: socket.socket,
        welcoming: Welcoming,
        *,
        connections_max: int = CONNECTIONS_MAX,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.counters = Counters()
        self._listener = listener
        self._listener.setblocking(False)
        self._welcoming = welcoming
        self._connections_max = connections_max
        self._handshake_s = handshake_s
        self._connections: set[Connection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._users = Counter[int]()

    async def serve(self) -> None:
        """Accept until cancelled; a single bad connection never ends it."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("accept failed: %s", error)
                await asyncio.sleep(0.1)  # out of descriptors: give sessions time to end
                continue
            try:
                peer = _peer(connected)
            except OSError as error:
                _log.warning("nobody knows who connects: %s", error)
                connected.close()
                continue
            self.counters.accepted += 1
            if full := self._full(peer):
                self._turn_away(connected, full)
                continue
            self.counters.connections += 1
            self._users[peer.uid] += 1
            task = loop.create_task(self._shake_hands(connected, peer))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._listener.close()
        for task in list(self._handshakes):
            task.cancel()
        for connection in list(self._connections):
            connection.end()

    def _full(self, peer: Peer) -> str:
        """Return why there is no room for one more, empty if there is."""
        most = int(USER_SHARE * self._connections_max)
        if self.counters.connections >= self._connections_max:
            return f"{self._connections_max} connections are served already; close some, or wait"
        if peer.uid not in (os.geteuid(), 0) and self._users[peer.uid] >= most:
            return f"{most} connections of user {peer.uid} are served already; close some, or wait"
        return ""

    def _turn_away(self, connected: socket.socket, message: str) -> None:
        self.counters.refused += 1
        with connected, contextlib.suppress(OSError, ProtocolError):
            _send_now(connected, CONNECTION_ID, Refused(message))

    async def _shake_hands(self, connected: socket.socket, peer: Peer) -> None:
        try:
            async with asyncio.timeout(self._handshake_s):
                reader, hello_id, hello = await self._listen(connected)
        except TimeoutError:
            self._drop(connected, peer, f"no hello within {self._handshake_s:g} s")
            return
        except (ProtocolError, OSError) as error:
            self._drop(connected, peer, str(error))
            return
        try:
            session = self._open(hello, peer)
        except Exception as error:  # noqa: BLE001  # one bad hello never costs a connection's place
            refused = _refusal(error)
            self.counters.refused += 1
            with contextlib.suppress(OSError, ProtocolError):
                _send_now(connected, hello_id, refused)
            self._drop(connected, peer, f"{hello.peer[:80]!r} refused: {refused.message}")
            return
        connection = Connection(session, reader, self.counters, partial(self._ended, peer))
        self._connections.add(connection)
        try:
            _send_now(connected, hello_id, session.welcome, session.arena_fd)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, connected)
        except (ProtocolError, OSError):
            connected.close()
            connection.connection_lost(None)

    def _ended(self, peer: Peer, connection: Connection) -> None:
        self._connections.discard(connection)
        self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        self.counters.connections -= 1
        self._users[peer.uid] -= 1
        if not self._users[peer.uid]:
            del self._users[peer.uid]

    def _drop(self, connected: socket.socket, peer: Peer, why: str) -> None:
        self._leave(peer)
        self.counters.protocol_errors += 1
        _log.warning("no session: %s", why)
        connected.close()

    async def _listen(self, connected: socket.socket) -> tuple[FrameReader[Request], int, Hello]:
        """Receive the hello; it must be the first message."""
        loop = asyncio.get_running_loop()
        connected.setblocking(False)
        reader = request_reader()
        while (frame := reader.next()) is None:
            nbytes = await loop.sock_recv_into(connected, reader.room())
            if not nbytes:
                raise ProtocolError("closed before it said hello")
            reader.took(nbytes)
        if not isinstance(frame.message, Hello):
            raise ProtocolError(f"the first message is {type(frame.message).__name__}, not Hello")
        return reader, frame.request_id, frame.message

    def _open(self, hello: Hello, peer: Peer) -> Answering:
        if hello.protocol != PROTOCOL:
            raise RefusedError(
                f"protocol version {hello.protocol} is not spoken here, {PROTOCOL} is; "
                "install the same version of holdfast on both sides"
            )
        return self._welcoming(hello, peer)


class Connection(asyncio.BufferedProtocol):
    """One connection after its hello."""

    def __init__(
        self,
        session: Answering,
        reader: FrameReader[Request],
        counters: Counters,
        ended: Callable[[Connection], None],
    ) -> None:
        self._session = session
        self._reader = reader
        self._counters = counters
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._in_flight = 0
        self._clogged = False
        self._paused = False

    def end(self) -> None:
        """Cut the connection; the session is told when it is down."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._ended(self)
        self._session.ended()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.took(nbytes)
        self._pump()

    def pause_writing(self) -> None:
        self._clogged = True

    def resume_writing(self) -> None:
        self._clogged = False
        self._pump()

    def _pump(self) -> None:
        """Serve every whole message at hand, unless the peer must first take some answers."""
        try:
            while self._transport is not None and not self._full():
                frame = self._reader.next()
                if frame is None:
                    break
                self._serve(frame.request_id, frame.message)
        except ProtocolError as error:
            self._counters.protocol_errors += 1
            _log.warning("connection cut: %s", error)
            self.end()
            return
        self._balance()

    def _full(self) -> bool:
        return self._clogged or self._in_flight >= IN_FLIGHT_MAX

    def _balance(self) -> None:
        """Read from the peer if and only if there is room for what it says."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._full() and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not self._full():
            self._transport.resume_reading()
        self._paused = self._full()

    def _serve(self, request_id: int, request: Request) -> None:
        self._counters.requests += 1
        try:
            reply = self._session.answer(request)
        except Exception as error:  # noqa: BLE001  # one bad request never ends a node
            self._write(request_id, self._refusal(error))
            return
        if isinstance(reply, Awaitable):
            self._in_flight += 1
            task = asyncio.ensure_future(self._finish(request_id, reply))
            task.add_done_callback(self._landed)
        else:
            self._write(request_id, reply)

    async def _finish(self, request_id: int, awaited: Awaitable[Reply]) -> None:
        try:
            reply = await awaited
        except Exception as error:  # noqa: BLE001  # one bad request never ends a node
            reply = self._refusal(error)
        self._write(request_id, reply)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._in_flight -= 1
        if not task.cancelled():
            self._pump()

    def _refusal(self, error: Exception) -> Refused:
        self._counters.refused += 1
        return _refusal(error)

    def _write(self, request_id: int, reply: Reply) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            frame = encode(request_id, reply)
        except ProtocolError as error:
            frame = encode(request_id, self._refusal(error))
        self._transport.write(frame)


def _refusal(error: Exception) -> Refused:
    """Return what a peer is told; what is our own fault goes to the log, too."""
    if isinstance(error, HoldfastError):
        return Refused(str(error))
    _log.error("request failed", exc_info=error)
    return Refused(f"the node failed: {type(error).__name__}: {error}; see its log")


def _peer(connected: socket.socket) -> Peer:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(pid, uid)


def _send_now(
    connected: socket.socket, request_id: int, reply: Reply, fd: int | None = None
) -> None:
    """Send a short frame into a fresh socket, which has room for it."""
    frame = encode(request_id, reply)
    fds = [] if fd is None else [fd]
    if socket.send_fds(connected, [frame], fds, socket.MSG_DONTWAIT) != len(frame):
        raise ProtocolError("the peer takes no answer to its hello")
