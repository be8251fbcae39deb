"""One connection to a node, from a process that has better things to do.

There is no reader thread: in an engine each hand-over of the interpreter may cost milliseconds, so
a call makes one short send and one receive. Whoever waits receives for everybody. The first error
or time-out ends the client for good: a node that is late is treated as gone, and the caller
recomputes. `holdfast.wire.link` connects again.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import NoReturn

from holdfast.errors import NodeGoneError, ProtocolError, RefusedError
from holdfast.wire.address import socket_path
from holdfast.wire.arena import ArenaMap
from holdfast.wire.doorstep import check_listener, owners_of
from holdfast.wire.frame import CONNECTION_ID, REQUEST_ID_MAX, encode, reply_reader
from holdfast.wire.messages import (
    PROTOCOL,
    Abort,
    Fetched,
    Hello,
    Refused,
    Release,
    Reply,
    Request,
    Reserved,
    Welcome,
)
from holdfast.wire.quick import readable_within, send_now

_TIMEVAL = struct.Struct("@ll")
_SHORTEST_WAIT_S = 0.001
_GLANCE_MS = 1
_EXPECTED_MS = 5
"""Who expects an answer would have to come back for it: for vLLM's scheduler that is a step in
which nothing is computed, some 3 ms, and leaves its processes spinning beside the next one."""

ROOM_S = 0.1
"""A node that takes no request for so long is gone: an engine's scheduler stands still with it."""


class Client:
    """A session with the node at `address`; any thread may call any method.

    Raises at once: NodeGoneError if there is no node or it does not answer within `timeout_s`,
    StrangerError if somebody else may stand behind the socket (nothing was said then),
    RefusedError if it does not want this session. `arena` is None where `hello` names no world.
    """

    def __init__(self, address: str, hello: Hello, timeout_s: float) -> None:
        self.address = address
        self.arena: ArenaMap | None = None
        self._timeout_s = timeout_s
        self._turn = threading.Condition(threading.Lock())
        self._receiving = False
        self._closed_for = ""
        self._reader = reply_reader()
        self._last_id = 0
        self._pending: set[int] = set()
        self._forgotten: set[int] = set()
        self._sending = False
        self._unasked: deque[Request] = deque()
        """What goes back to the node as soon as no other frame is half sent."""
        self._replies: dict[int, Reply] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.welcome = self._shake_hands(hello)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            with self._turn:
                self._end(f"no session: {error.strerror}; `holdfast serve` starts a node")
        except OSError as error:
            with self._turn:
                self._end(f"no session: {error.strerror or error}")
        except BaseException:
            self._socket.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the connection is over; then every call raises NodeGoneError."""
        return bool(self._closed_for)

    def send(self, message: Request) -> int:
        """Send a request; return its id for `poll`, `wait` or `forget`."""
        with self._turn:
            self._check_open()
            request_id = self._post(message)
            self._post_unasked()
            return request_id

    def poll(self, request_id: int) -> Reply | None:
        """Return the reply if it is here, else None; never waits.

        Raises RefusedError with the node's words, as `wait` does.
        """
        with self._turn:
            self._check_open()
            if request_id not in self._replies and not self._receiving:
                self._drain()
            return self._take(request_id)

    def expect(self, request_id: int) -> Reply | None:
        """Return the reply if it is here or comes within a few milliseconds, else None.

        The interpreter is not given up meanwhile. Raises as `poll` does.
        """
        with self._turn:
            self._check_open()
            if request_id not in self._replies and not self._receiving:
                self._drain()  # what is there already may answer others only
            if request_id not in self._replies and not self._receiving:
                self._glance(_EXPECTED_MS)
            return self._take(request_id)

    def wait(self, request_id: int, timeout_s: float) -> Reply:
        """Return the reply; if it does not come within `timeout_s` the client is closed."""
        deadline = time.monotonic() + timeout_s
        with self._turn:
            self._check_open()
            if request_id not in self._replies and not self._receiving:
                self._glance()
            while (reply := self._take(request_id)) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    self._end(f"no answer within {timeout_s:g} s")
                if self._receiving:
                    self._turn.wait(left_s)
                else:
                    self._receive(left_s)
                self._check_open()
            return reply

    def call(self, message: Request, timeout_s: float) -> Reply:
        """Send a request and wait for its reply."""
        return self.wait(self.send(message), timeout_s)

    def forget(self, request_id: int) -> None:
        """Drop interest in a reply; a lease or ticket that it grants goes back to the node."""
        with self._turn:
            if self._closed_for or request_id not in self._pending:
                return
            self._pending.remove(request_id)
            self._forgotten.add(request_id)
            reply = self._replies.pop(request_id, None)
            if reply is not None:
                self._return(request_id, reply)

    def wait_gone(self) -> None:
        """Return when the connection is over, whoever ended it; notices an idle node's death."""
        with self._turn:
            if self._closed_for:
                return
            watched = self._socket.dup()
        with watched:
            poll = select.poll()
            poll.register(watched, select.POLLRDHUP)
            poll.poll()

    def close(self) -> None:
        """End the session; the node takes back what it still holds."""
        with self._turn, contextlib.suppress(NodeGoneError):
            self._end("closed by its owner")

    # Everything below is called with `_turn` held.

    def _check_open(self) -> None:
        if self._closed_for:
            raise NodeGoneError(f"node {self.address}: {self._closed_for}")

    def _end(self, reason: str) -> NoReturn:
        if not self._closed_for:
            self._closed_for = reason
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever receives
            if not self._receiving:
                self._socket.close()
            self._turn.notify_all()
        raise NodeGoneError(f"node {self.address}: {self._closed_for}")

    def _post(self, message: Request) -> int:
        request_id = self._last_id = self._last_id % REQUEST_ID_MAX + 1
        frame = bytes(encode(request_id, message))
        self._pending.add(request_id)
        deadline = time.monotonic() + min(ROOM_S, self._timeout_s)
        self._sending = True
        while frame:
            try:
                sent = send_now(self._socket.fileno(), frame)
            except OSError as error:
                self._end(f"send failed: {error}")
            frame = frame[sent:]
            if frame:
                self._make_way(deadline)
        self._sending = False
        return request_id

    def _make_way(self, deadline: float) -> None:
        """The socket is full: wait for room, and take replies in, or both sides may wait."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            self._end(f"took no request for {min(ROOM_S, self._timeout_s):g} s")
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT | (0 if self._receiving else select.POLLIN))
        poll.poll(1000 * left_s)
        if not self._receiving:
            self._drain()

    def _glance(self, within_ms: int = _GLANCE_MS) -> None:
        """Take in an answer that comes at once, without giving the interpreter up meanwhile."""
        if readable_within(self._socket.fileno(), within_ms):
            self._drain()

    def _drain(self) -> None:
        while True:
            room = self._reader.room()
            try:
                nbytes = self._socket.recv_into(room, flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"receive failed: {error}")
            self._digest(nbytes)
            if nbytes < len(room):
                return

    def _receive(self, left_s: float) -> None:
        """Receive once, for everybody, with the lock given up meanwhile; returns early if late.

        One blocking call with the kernel's own time-out: one hand-over of the interpreter.
        """
        room, nbytes, failure = self._reader.room(), -1, ""
        seconds, rest = divmod(max(left_s, _SHORTEST_WAIT_S), 1.0)
        timeval = _TIMEVAL.pack(int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._receiving = True
        self._turn.release()
        try:
            nbytes = self._socket.recv_into(room)
        except BlockingIOError:
            pass
        except OSError as error:
            failure = f"receive failed: {error}"
        finally:
            self._turn.acquire()
            self._receiving = False
            self._turn.notify_all()
            if self._closed_for:
                self._socket.close()
        self._check_open()
        if failure:
            self._end(failure)
        if nbytes >= 0:
            self._digest(nbytes)

    def _digest(self, nbytes: int) -> None:
        """Sort `nbytes` just received into replies."""
        if not nbytes:
            self._end("the connection broke")
        self._reader.took(nbytes)
        try:
            while frame := self._reader.next():
                self._deliver(frame.request_id, frame.message)
        except ProtocolError as error:
            self._end(str(error))

    def _deliver(self, request_id: int, reply: Reply) -> None:
        if request_id in self._pending:
            self._replies[request_id] = reply
        elif request_id in self._forgotten:
            self._return(request_id, reply)
        elif request_id == CONNECTION_ID and isinstance(reply, Refused):
            self._end(reply.message)
        else:
            raise ProtocolError(f"a reply to request {request_id}, which was not asked")

    def _return(self, request_id: int, reply: Reply) -> None:
        self._forgotten.remove(request_id)
        if isinstance(reply, Fetched) and reply.lease:
            self._unasked.append(Release(reply.lease))
        elif isinstance(reply, Reserved) and reply.ticket:
            self._unasked.append(Abort(reply.ticket))
        self._post_unasked()

    def _post_unasked(self) -> None:
        while self._unasked and not self._sending:
            request_id = self._post(self._unasked.popleft())
            self._pending.remove(request_id)
            self._forgotten.add(request_id)

    def _take(self, request_id: int) -> Reply | None:
        if request_id not in self._pending:
            raise ValueError(f"request {request_id} was not sent, or its reply was taken")
        reply = self._replies.pop(request_id, None)
        if reply is not None:
            self._pending.remove(request_id)
        if isinstance(reply, Refused):
            raise RefusedError(reply.message)
        return reply

    # Before the object is shared.

    def _shake_hands(self, hello: Hello) -> Welcome:
        self._socket.settimeout(self._timeout_s)
        path = socket_path(self.address)
        owners = owners_of(path)
        self._socket.connect(path)
        check_listener(self._socket, path, owners)
        self._last_id += 1
        greeting = encode(self._last_id, hello)
        with contextlib.suppress(ConnectionError):  # turned away unheard: the reason is there yet
            self._socket.sendall(greeting)
        descriptors: list[int] = []
        while (frame := self._reader.next()) is None:
            room = self._reader.room()
            data, fds, _, _ = socket.recv_fds(self._socket, len(room), 1, socket.MSG_CMSG_CLOEXEC)
            descriptors += fds
            if not data:
                raise ConnectionError("the node closed the connection")
            room[: len(data)] = data
            self._reader.took(len(data))
        self._socket.settimeout(None)
        welcome = frame.message
        if isinstance(welcome, Refused):
            raise RefusedError(welcome.message)
        if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL:
            raise ProtocolError(f"node {self.address} answered hello with {welcome!r:.200}")
        if welcome.arena_bytes:
            if not descriptors:
                raise ProtocolError(f"node {self.address} sent no descriptor of its arena")
            try:
                self.arena = ArenaMap(descriptors.pop(), welcome.arena_bytes)
            except (ValueError, OverflowError) as error:
                raise ProtocolError(
                    f"node {self.address} announced an arena of {welcome.arena_bytes} bytes, and "
                    "the one it sent is of another size"
                ) from error
        return welcome
