"""Objects and ranges by plain HTTP, straight between the socket and the caller's buffers.

obstore returns a range in new memory, from which it has to be copied, and copies and hashes what it
puts: two to four times the CPU time of this client. Requests have signed URLs, so they need no
other header; the payload of a put is not signed, because every record has a tag of its own. Only
the answer of every store to a good request is understood here. After any other one the caller asks
with obstore, which knows redirects, retries and errors.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from holdfast.address import HostPort
from holdfast.limits import KIB
from holdfast.wire.remote.stream import Deadline, PlainStream, dial, first_to_arrive, tune

IDLE_S = 5.0
"""Longest time for which an idle connection is used again: servers close theirs later."""

HTTP_PORT = 80

_HEAD_BYTES_MAX = 16 * KIB
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})\b")
_RANGE = re.compile(rb"\r\ncontent-range: *bytes (\d+)-(\d+)/", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+) *\r\n", re.IGNORECASE)
_CODED = re.compile(rb"\r\n(transfer-encoding|content-encoding):", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close *\r\n", re.IGNORECASE)
_END = b"\r\n\r\n"
_PARTIAL = b"206"
_STORED = (b"200", b"201")


Method: TypeAlias = Literal["GET", "PUT"]


class Hedging(NamedTuple):
    """A second request is sent, if no answer has begun after `late_s` and `take` permits it."""

    late_s: float
    take: Callable[[], bool]


class _Request(NamedTuple):
    method: Method
    endpoint: HostPort
    head: bytes
    body: Sequence[memoryview] = ()


class _Idle(NamedTuple):
    stream: PlainStream
    since_s: float


class DirectClient:
    """Puts objects into one store and reads ranges. Thread-safe; works in its caller's thread.

    `sign` returns a signed URL for a method and an object; `count` is called with the method of
    each request that is sent. At most `idle_max` idle connections are kept.
    """

    def __init__(
        self,
        sign: Callable[[Method, str, Deadline], str],
        count: Callable[[Method], None],
        idle_max: int,
    ) -> None:
        self._sign = sign
        self._count = count
        self._idle_max = idle_max
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._active: set[PlainStream] = set()
        self._closed = False

    def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        deadline: Deadline,
        hedging: Hedging | None,
    ) -> int | None:
        """Read a range into consecutive buffers; return its bytes, fewer at the object's end.

        Returns None if the store gave any other answer, or the connection failed: then the content
        of the buffers is undefined. Raises TimeoutError at the deadline.
        """
        end = start + sum(map(len, into)) - 1
        lines = f"Range: bytes={start}-{end}\r\nAccept-Encoding: identity\r\n"
        if (request := self._request("GET", name, lines, deadline)) is None:
            return None
        with self._exchange() as opened:
            try:
                stream = self._answering(request, deadline, hedging, opened)
                nbytes, may_reuse = _receive(stream, start, into, deadline)
            except TimeoutError:
                raise
            except OSError:
                return None
            if may_reuse:
                opened.remove(stream)
                self._keep(stream)
            return nbytes

    def put(self, name: str, parts: Sequence[memoryview], deadline: Deadline) -> bool:
        """Put an object of these parts, joined; return whether the store says that it is stored.

        If not, it may be stored all the same. Raises TimeoutError at the deadline.
        """
        lines = f"Content-Length: {sum(map(len, parts))}\r\n"
        if (request := self._request("PUT", name, lines, deadline)) is None:
            return False
        with self._exchange() as opened:
            try:
                stream = self._asked(request._replace(body=parts), deadline, opened)
                is_stored, may_reuse = _receive_stored(stream, deadline)
            except TimeoutError:
                raise
            except OSError:
                return False
            if may_reuse:
                opened.remove(stream)
                self._keep(stream)
            return is_stored

    def close(self) -> None:
        """End calls in progress, and all connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for stream in self._active:
                stream.cut()
        for each in idle:
            each.stream.close()

    def _request(
        self, method: Method, name: str, lines: str, deadline: Deadline
    ) -> _Request | None:
        """Return a request with a signed URL; None if that is not of plain HTTP."""
        url = urlsplit(self._sign(method, name, deadline))
        if url.scheme != "http" or not url.hostname:
            return None
        head = f"{method} {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n{lines}\r\n"
        return _Request(method, HostPort(url.hostname, url.port or HTTP_PORT), head.encode())

    def _answering(
        self,
        request: _Request,
        deadline: Deadline,
        hedging: Hedging | None,
        opened: list[PlainStream],
    ) -> PlainStream:
        """Send a request, or two; return the stream of the answer that begins first."""
        first = self._asked(request, deadline, opened)
        if hedging is None or first_to_arrive([first], min(hedging.late_s, deadline.seconds())):
            return first
        if not hedging.take():
            return first
        second = self._asked(request, deadline, opened)
        found = first_to_arrive([first, second], deadline.seconds())
        if found is None:
            raise TimeoutError("no answer by the deadline")
        return found

    def _asked(
        self, request: _Request, deadline: Deadline, opened: list[PlainStream]
    ) -> PlainStream:
        """Send a request on an idle connection that is still open, or on a new one."""
        stream = self._take_idle()
        if stream is None:
            connected = dial(request.endpoint, deadline)
            tune(connected, request.endpoint)
            stream = PlainStream(connected)
        with self._lock:
            self._active.add(stream)
            opened.append(stream)
            if self._closed:
                raise ConnectionAbortedError("the client was closed")
        self._count(request.method)
        stream.send([request.head, *request.body], deadline)
        return stream

    def _take_idle(self) -> PlainStream | None:
        """Return an idle connection that the store has not closed."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                stream, since_s = self._idle.pop()
            # A store sends nothing unasked, so what has arrived is the end of the connection.
            if time.monotonic() - since_s < IDLE_S and first_to_arrive([stream], 0.0) is None:
                return stream
            stream.close()

    def _keep(self, stream: PlainStream) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            self._active.discard(stream)
            if not self._closed and len(self._idle) < self._idle_max:
                self._idle.append(_Idle(stream, time.monotonic()))
                return
        stream.close()

    @contextmanager
    def _exchange(self) -> Iterator[list[PlainStream]]:
        """Yield a list for the connections of one call; those left in it are closed at the end."""
        opened: list[PlainStream] = []
        try:
            yield opened
        finally:
            with self._lock:
                self._active.difference_update(opened)
            for stream in opened:
                with contextlib.suppress(OSError):
                    stream.close()


def _receive(
    stream: PlainStream, start: int, into: Sequence[memoryview], deadline: Deadline
) -> tuple[int | None, bool]:
    """Receive an answer; return its bytes, and whether the connection can be used again.

    None: the answer is not the range that was asked for.
    """
    lines, body = _receive_head(stream, deadline)
    status, span, length = _STATUS.match(lines), _RANGE.search(lines), _LENGTH.search(lines)
    if not status or status[1] != _PARTIAL or not span or not length or _CODED.search(lines):
        return None, False
    nbytes, wanted = int(length[1]), sum(map(len, into))
    is_range = int(span[1]) == start and int(span[2]) - start + 1 == nbytes
    if not is_range or nbytes > wanted or len(body) > nbytes:
        return None, False
    parts = _clipped(into, nbytes)
    stream.receive(_behind(parts, body), deadline)
    return nbytes, not _CLOSES.search(lines)


def _receive_stored(stream: PlainStream, deadline: Deadline) -> tuple[bool, bool]:
    """Receive the answer to a put; return whether it is stored, and the connection reusable."""
    lines, body = _receive_head(stream, deadline)
    status, length = _STATUS.match(lines), _LENGTH.search(lines)
    is_stored = status is not None and status[1] in _STORED
    # An answer with a body is rare: its connection is closed.
    is_empty = length is not None and int(length[1]) == 0 and not body
    return is_stored, is_empty and not _CODED.search(lines) and not _CLOSES.search(lines)


def _receive_head(stream: PlainStream, deadline: Deadline) -> tuple[bytes, memoryview]:
    """Return the lines of an answer, and what has arrived behind them; no lines if too many."""
    head, filled = memoryview(bytearray(_HEAD_BYTES_MAX)), 0
    while (end := bytes(head[:filled]).find(_END)) < 0:
        if filled == len(head):
            return b"", head[:0]
        filled += stream.receive_some(head[filled:], deadline)
    end += len(_END)
    return bytes(head[:end]), head[end:filled]


def _clipped(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first `nbytes` of consecutive buffers."""
    found = []
    for part in parts:
        if nbytes <= 0:
            break
        found.append(part[:nbytes])
        nbytes -= len(part)
    return found


def _behind(parts: Sequence[memoryview], body: memoryview) -> list[memoryview]:
    """Copy the beginning of a body into consecutive buffers; return what is left of these."""
    left = []
    for part in parts:
        taken = min(len(part), len(body))
        part[:taken] = body[:taken]
        body = body[taken:]
        if taken < len(part):
            left.append(part[taken:])
    return left
