"""A read-only HTTP/1.1 server on a thread of its own, with a limit on everything a client may do.

It answers GET and HEAD, closes each connection after its answer, and reads no request body. It
disconnects clients that send or read too slowly. Connections above the limit get status 503, except
that probes, the public paths, are answered. Above twice the limit, other requests are closed
without an answer, and each new connection replaces the oldest one whose request has not arrived. So
a scrape that stalls, or a page that is open in 200 browsers, costs the node no more than `LIMITS`
allows, and clients that send nothing do not make an orchestrator restart the node.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, Self

from holdfast.errors import RefusedError
from holdfast.limits import KIB

_CRLF2 = b"\r\n\r\n"
_BACKLOG = 64
_START_S = 5.0
_CANCEL_S = 0.1
_CLOSE_FACTOR = 2
"""Above this multiple of the limit, connections are closed without an answer, except probes."""

_log = logging.getLogger(__name__)


class HttpLimits(NamedTuple):
    """Limits on clients; times in seconds.

    A request has at most `head_bytes` and must arrive within `head_s`, or within `hurried_head_s`
    while more than `connections` are open. An answer, or one event of a stream, must be read within
    `write_s`. Of `connections` at most `streams` may be streams.
    """

    head_bytes: int = 8 * KIB
    head_s: float = 5.0
    hurried_head_s: float = 2.0
    write_s: float = 10.0
    connections: int = 64
    streams: int = 32


LIMITS = HttpLimits()


class Answer(NamedTuple):
    """An answer: its status, its body (whole, or a stream of chunks) and the body's type."""

    status: HTTPStatus
    body: bytes | AsyncIterator[bytes]
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}


Route = Callable[[], Awaitable[Answer]]


class Routes(NamedTuple):
    """The function that answers each path; the paths in `public` are probes, for every client.

    They need no token, and are answered above the limit of connections.
    """

    of_path: Mapping[str, Route]
    public: frozenset[str] = frozenset()


class HttpServer:
    """Serves a bound socket until `close`, and owns it.

    `token`: secret that a client presents as a bearer token or as the password of basic
    authentication; empty if clients need none. `check_client`: called in a thread with each
    connection that asks for a path that is not public; raises RefusedError to refuse it.
    `deny`: called with the client and the reason for each wrong token, not for a missing one: a
    browser presents its password only when it was asked.
    """

    def __init__(
        self,
        listener: socket.socket,
        routes: Routes,
        token: bytes = b"",
        limits: HttpLimits = LIMITS,
        check_client: Callable[[socket.socket], None] | None = None,
        deny: Callable[[str, str], None] | None = None,
    ) -> None:
        self._listener = listener
        self._routes = routes
        self._token = token
        self._limits = limits
        self._check_client = check_client
        self._deny = deny
        self._connections: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], float] = {}
        """Connections whose request has not arrived, oldest first, and when they were accepted."""
        self._streams = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-http", daemon=True)

    def start(self) -> Self:
        """Start to answer clients."""
        self._thread.start()
        self._listening.wait(_START_S)
        return self

    def close(self) -> None:
        """Disconnect all clients and stop listening."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:  # noqa: BLE001  # the node serves engines without it
            _log.exception("metrics and status are not served any more")
        finally:
            self._listening.set()
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._listener, limit=self._limits.head_bytes, backlog=_BACKLOG
        )
        self._listening.set()
        await self._over.wait()
        server.close()
        while connections := list(self._connections):  # one accepted just now may begin late
            for connection in connections:
                connection.cancel()
            await asyncio.wait(connections, timeout=_CANCEL_S)
        await self._loop.shutdown_default_executor()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:  # pragma: no cover  # asyncio runs it as a task
            return
        self._connections.add(task)
        self._silent[task] = self._loop.time()
        self._close_silent()
        is_answered = False
        try:
            async with asyncio.timeout(self._limits.head_s):
                head = await reader.readuntil(_CRLF2)
            self._silent.pop(task, None)
            answer = await self._answer(head, writer)
            if answer is None:
                return
            is_answered = True
            await self._send(writer, answer, with_body=not head.startswith(b"HEAD "))
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # the client went away or was too slow
        except asyncio.CancelledError:
            pass  # the server closes; asyncio would log it
        except asyncio.LimitOverrunError:
            await self._refuse(writer, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except Exception:  # noqa: BLE001  # the client gets the error; the server goes on
            _log.exception("an HTTP request failed")
            if not is_answered:  # else the head was sent, and the client sees the stream break
                await self._refuse(writer, HTTPStatus.INTERNAL_SERVER_ERROR)
        finally:
            self._connections.discard(task)
            self._silent.pop(task, None)
            writer.transport.abort()

    def _close_silent(self) -> None:
        """Above a limit, close connections whose request should have arrived by now."""
        most, now_s = self._limits.connections, self._loop.time()
        for task, since_s in list(self._silent.items()):
            is_late = now_s - since_s > self._limits.hurried_head_s
            if len(self._connections) <= (most if is_late else _CLOSE_FACTOR * most):
                return
            del self._silent[task]
            self._connections.discard(task)
            task.cancel()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> Answer | None:
        """Return the answer to a request, given its head; None: close without one."""
        method, _, rest = head.partition(b" ")
        target, _, version = rest.partition(b"\r\n")[0].rpartition(b" ")
        path = target.partition(b"?")[0].decode("ascii", "replace")
        is_public = path in self._routes.public
        if not is_public and len(self._connections) > self._limits.connections:
            if len(self._connections) >= _CLOSE_FACTOR * self._limits.connections:
                return None
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "5"})
        if not version.startswith(b"HTTP/1."):
            return _refusal(HTTPStatus.BAD_REQUEST)
        if method not in (b"GET", b"HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        route = self._routes.of_path.get(path)
        if route is None:
            return _refusal(HTTPStatus.NOT_FOUND)
        if not is_public and self._token:
            secret = _presented(head)
            if secret is None or not hmac.compare_digest(secret, self._token):
                if secret is not None:
                    self._note_denied(writer)
                return _UNAUTHORIZED
        if not is_public and self._check_client is not None:
            connected: socket.socket = writer.get_extra_info("socket")
            try:
                await self._loop.run_in_executor(None, self._check_client, connected)
            except RefusedError as error:
                return Answer(HTTPStatus.FORBIDDEN, f"403 Forbidden: {error}\n".encode())
        try:
            return await route()
        except Exception:  # noqa: BLE001  # an OSError too, which is not the client's here
            _log.exception("an HTTP request failed path=%s", path)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _note_denied(self, writer: asyncio.StreamWriter) -> None:
        if self._deny is not None:
            name = writer.get_extra_info("peername")
            who = f"host {name[0]}" if isinstance(name, tuple) else "a client of http"
            self._deny(who, "presented a wrong token over HTTP")

    async def _send(
        self, writer: asyncio.StreamWriter, answer: Answer, *, with_body: bool = True
    ) -> None:
        if not isinstance(answer.body, bytes) and self._streams >= self._limits.streams:
            answer = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "5"})
        headers = {
            "Content-Type": answer.content_type,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            **answer.headers,
        }
        if isinstance(answer.body, bytes):
            headers["Content-Length"] = str(len(answer.body))
        lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if isinstance(answer.body, bytes):
            writer.write(answer.body if with_body else b"")
            await self._drain(writer)
        elif with_body:
            self._streams += 1
            try:
                async for chunk in answer.body:
                    writer.write(chunk)
                    await self._drain(writer)
            finally:
                self._streams -= 1
        writer.close()
        async with asyncio.timeout(self._limits.write_s):
            await writer.wait_closed()

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._limits.write_s):
            await writer.drain()

    async def _refuse(self, writer: asyncio.StreamWriter, status: HTTPStatus) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            await self._send(writer, _refusal(status))


def _presented(head: bytes) -> bytes | None:
    """Return the secret of a request, a bearer token or a password; None if it presents none."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() != b"authorization":
            continue
        scheme, _, rest = value.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            return rest.strip()
        if scheme.lower() == b"basic":
            with contextlib.suppress(binascii.Error):
                return base64.b64decode(rest).partition(b":")[2]
        return b""
    return None


def _refusal(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, f"{status.value} {status.phrase}\n".encode(), headers=headers or {})


_UNAUTHORIZED = _refusal(HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": 'Basic realm="holdfast"'})
