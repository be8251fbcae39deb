"""The node's server for engines: framing, limits and backpressure; sessions answer the requests.

A connection must send its hello within a deadline. A coroutine handles the handshake, because the
handshake passes a descriptor; a peer that gets no session is told why. Afterwards the event loop
receives. If a peer has too many requests under way, the server stops reading from it until replies
are sent. A peer that sends invalid data is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from holdfast.errors import HoldfastError, ProtocolError, RefusedError
from holdfast.limits import CONNECTIONS_MAX, HANDSHAKE_S, IN_FLIGHT_MAX
from holdfast.node.local.sessions import NodeSession
from holdfast.node.refusals import RefusalLog
from holdfast.wire.fields import TEXT_CHARS_MAX
from holdfast.wire.frame import (
    CONNECTION_ID,
    RECEIVE_BYTES,
    Frame,
    FrameReader,
    encode,
    request_reader,
)
from holdfast.wire.local.messages import PROTOCOL, Hello, Refused, Reply, Request
from holdfast.wire.local.peer_check import ROOT, ConnectedPeer, peer_of

USER_SHARE = 0.25
"""Maximum share of the connections that another user than the node's may have."""

REFUSE_S = 1.0
"""Time in which a peer can receive why its connection ends."""

_log = logging.getLogger(__name__)


class NodeServer:
    """Accepts connections on a listening Unix socket, and owns it.

    `welcoming` opens a session, or raises HoldfastError, whose message is sent to the peer.
    """

    def __init__(
        self,
        listener: socket.socket,
        welcoming: Callable[[Hello, ConnectedPeer], Awaitable[NodeSession]],
        *,
        connections_max: int = CONNECTIONS_MAX,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._welcoming = welcoming
        self._connections_max = connections_max
        self._handshake_s = handshake_s
        self._connections: set[ServerConnection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._users = Counter[int]()
        self._refusals = RefusalLog(_log)

    @property
    def connections(self) -> int:
        """The number of open connections, with those in the handshake."""
        return self._users.total()

    async def serve(self) -> None:
        """Accept connections until cancelled; a failed connection does not end the server."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("accept failed: %s", error)
                await asyncio.sleep(0.1)  # no free descriptor: wait until sessions end
                continue
            try:
                peer = peer_of(connected)
            except OSError as error:
                _log.warning("no session: no credentials of a connecting peer: %s", error)
                connected.close()
                continue
            if full := self._full(peer):
                with connected, contextlib.suppress(OSError, ProtocolError):
                    _send_now(connected, CONNECTION_ID, Refused(full))
                continue
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

    def _full(self, peer: ConnectedPeer) -> str:
        """Return why a new connection of this peer is refused; empty if it is not."""
        most = int(USER_SHARE * self._connections_max)
        if self.connections >= self._connections_max:
            return f"{self._connections_max} connections are open, the limit; close some, or wait"
        if peer.uid not in (os.geteuid(), ROOT) and self._users[peer.uid] >= most:
            return f"{most} connections of user {peer.uid} are open, the limit; close some, or wait"
        return ""

    async def _shake_hands(self, connected: socket.socket, peer: ConnectedPeer) -> None:
        reader = request_reader()
        request_id, name = CONNECTION_ID, ""
        try:
            connected.setblocking(False)
            request_id, hello = await self._first_message(connected, reader)
            if not isinstance(hello, Hello):
                raise ProtocolError(f"the first message is {type(hello).__name__}, not Hello")
            name = f"{hello.peer[:80]!r} "
            if hello.protocol != PROTOCOL:
                raise RefusedError(
                    f"protocol version {hello.protocol} is not supported, only {PROTOCOL}; install "
                    "the same version of holdfast on both sides"
                )
            session = await self._welcoming(hello, peer)
        except Exception as error:  # noqa: BLE001  # the connection must be uncounted whatever fails
            refused = _refusal(error)
            with contextlib.suppress(OSError, ProtocolError):
                _send_now(connected, request_id, refused)
            self._users -= Counter((peer.uid,))
            self._warn(peer, f"no session: {name}refused: {refused.message}")
            connected.close()
            return
        except asyncio.CancelledError:  # the server closes
            self._users -= Counter((peer.uid,))
            connected.close()
            raise
        ended, warn = partial(self._ended, peer), partial(self._warn, peer)
        connection = ServerConnection(session, reader, ended, warn)
        self._connections.add(connection)
        try:
            _send_now(connected, request_id, session.welcome, session.arena_fd)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, connected)
        except (ProtocolError, OSError) as error:
            _log.warning("no session: %scould not be sent its welcome: %s", name, error)
            connected.close()
            connection.connection_lost(None)

    async def _first_message(
        self, connected: socket.socket, reader: FrameReader[Request]
    ) -> Frame[Request]:
        """Receive a message within the deadline of the handshake.

        Raises RefusedError after the deadline, ProtocolError if the connection ended or its data is
        invalid. What the peer sent in time counts, even if this event loop was too busy to read it
        in time.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._handshake_s
        readable = asyncio.Event()
        loop.add_reader(connected, readable.set)
        try:
            while (frame := reader.next()) is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline_s):
                        await readable.wait()
                readable.clear()
                try:
                    data = connected.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    if loop.time() >= deadline_s:
                        raise RefusedError(
                            f"no hello arrived within {self._handshake_s:g} s; connect again"
                        ) from None
                    continue
                except OSError as error:
                    raise ProtocolError(f"the connection failed before a hello: {error}") from error
                if not data:
                    raise ProtocolError("the connection was closed before a hello")
                reader.feed(data)
            return frame
        finally:
            loop.remove_reader(connected)

    def _warn(self, peer: ConnectedPeer, line: str) -> None:
        """Log a warning about a peer, and count it if it is a repetition."""
        self._refusals.report(f"user {peer.uid}", line, line)

    def _ended(self, peer: ConnectedPeer, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._users -= Counter((peer.uid,))


class ServerConnection(asyncio.BufferedProtocol):
    """One connection after its handshake.

    It receives into memory of its own: for `data_received`, asyncio allocates 256 KiB each time.
    """

    def __init__(
        self,
        session: NodeSession,
        reader: FrameReader[Request],
        ended: Callable[[ServerConnection], None],
        warn: Callable[[str], None],
    ) -> None:
        """`ended` is called when the connection ends, `warn` with why the server ends it."""
        self._session = session
        self._reader = reader
        self._ended = ended
        self._warn = warn
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._in_flight = 0
        self._write_paused = False

    def refuse(self, reason: str) -> None:
        """Tell the peer why the connection ends, and end it soon whatever the peer does."""
        if self._transport is None:
            return
        self._write(CONNECTION_ID, Refused(reason[:TEXT_CHARS_MAX]))
        self._transport.close()
        asyncio.get_running_loop().call_later(REFUSE_S, self.end)

    def end(self) -> None:
        """Abort the connection; the event loop then calls the session's `ended`."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._session.end = self.refuse
        self._serve_received()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._ended(self)
        self._session.ended()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed(self._buffer[:nbytes])
        self._serve_received()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._serve_received()

    def _serve_received(self) -> None:
        """Serve every complete message, until too many requests or replies are under way.

        Reading from the peer is paused while they are.
        """
        try:
            while self._transport is not None and not self._full():
                frame = self._reader.next()
                if frame is None:
                    break
                request_id, request = frame
                try:
                    reply = self._session.answer(request)
                except Exception as error:  # noqa: BLE001  # one bad request never ends a node
                    reply = _refusal(error)
                if isinstance(reply, Awaitable):
                    self._in_flight += 1
                    task = asyncio.ensure_future(self._finish(request_id, reply))
                    task.add_done_callback(self._task_ended)
                else:
                    self._write(request_id, reply)
        except ProtocolError as error:
            self._warn(f"connection closed: {error}")
            self.end()
            return
        if self._transport is None or self._transport.is_closing():
            return
        if self._full():
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _full(self) -> bool:
        return self._write_paused or self._in_flight >= IN_FLIGHT_MAX

    async def _finish(self, request_id: int, awaited: Awaitable[Reply]) -> None:
        try:
            reply = await awaited
        except Exception as error:  # noqa: BLE001  # one bad request never ends a node
            reply = _refusal(error)
        self._write(request_id, reply)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight -= 1
        if not task.cancelled():
            self._serve_received()

    def _write(self, request_id: int, reply: Reply) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            frame = encode(request_id, reply)
        except ProtocolError as error:
            frame = encode(request_id, _refusal(error))
        self._transport.write(frame)


def _refusal(error: Exception) -> Refused:
    """Return the refusal to send for an error; log it if it is the node's own failure."""
    if isinstance(error, HoldfastError):
        return Refused(str(error)[:TEXT_CHARS_MAX])
    _log.error("request failed", exc_info=error)
    return Refused(f"the node failed: {type(error).__name__}: {error}; see its log")


def _send_now(
    connected: socket.socket, request_id: int, reply: Reply, fd: int | None = None
) -> None:
    """Send a short frame into a new socket, whose buffer is empty."""
    frame = encode(request_id, reply)
    fds = [] if fd is None else [fd]
    if socket.send_fds(connected, [frame], fds, socket.MSG_DONTWAIT) != len(frame):
        raise ProtocolError("the peer does not receive the answer to its hello")
