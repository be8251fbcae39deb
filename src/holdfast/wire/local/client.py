"""A client of a node over one Unix socket, without a reader thread.

In an engine each hand-over of the GIL may take milliseconds, so a call makes one short send and one
receive. One waiting thread receives the replies for all threads. The first error or timeout ends
the client for good: a late node counts as gone, and the caller recomputes.
`holdfast.wire.local.reconnecting_client` connects again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import NoReturn, TypeVar

from holdfast.address import socket_path
from holdfast.buffers import SharedMapping
from holdfast.errors import NodeGoneError, ProtocolError, RefusedError
from holdfast.wire.frame import (
    CONNECTION_ID,
    RECEIVE_BYTES,
    REQUEST_ID_MAX,
    encode,
    reply_reader,
)
from holdfast.wire.local.messages import (
    PROTOCOL,
    Abort,
    Fetched,
    Hello,
    Locked,
    Refused,
    Release,
    Reply,
    Request,
    Reserved,
    Unlock,
    Welcome,
)
from holdfast.wire.local.peer_check import check_listener, owners_of, peer_of

T = TypeVar("T")

# The calls of this library hold the GIL. Python releases it around every socket call; if another
# thread computes, reacquiring it takes up to the switch interval, 5 ms, for a send of 5 us.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_libc.send.restype = ctypes.c_ssize_t
_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_TIMEVAL = struct.Struct("@ll")
_SHORTEST_WAIT_S = 0.001
_SLICE_S = 0.1
"""Length of the parts of a wait for a reply; after each the client checks if it woke in time."""

_LATE_S = 0.02
"""Delay of a wake-up that is longer than the kernel's timer explains."""

_SHORT_WAIT_S = 0.001
_HELD_S = 0.005
"""Longest part of the wait of `expect` with the GIL held: reacquiring it may take as long."""

STARVED_S = 1.0
"""Time beyond its timeout that a call waits for a node that is ready to run."""

_STARVED_SLICE_S = 0.01
"""Interval between two checks whether such a node is still ready to run."""

SEND_S = 0.1
"""Timeout of a send: a node that accepts no bytes for this long counts as gone."""


class Client:
    """A session with the node at `address`; any thread may call any method.

    The constructor connects. It raises NodeGoneError if no node answers within `timeout_s`,
    UntrustedPeerError if another user's process may listen at the socket (then nothing was sent),
    and RefusedError if the node refuses the session.
    """

    def __init__(self, address: str, hello: Hello, timeout_s: float) -> None:
        self.address = address
        self.arena: SharedMapping | None = None
        """The node's arena; None if `hello` names no namespace. Places are offsets in it.

        It stays mapped until the last reference to it and its views is gone, also after the
        connection has ended; keep a reference while copying by address. Copied bytes may be used
        only if the lease is valid after the copy.
        """
        self._timeout_s = timeout_s
        self._lock = threading.Condition(threading.Lock())
        self._receiving = False
        self._closed_for = ""
        self._reader = reply_reader()
        self._last_id = 0
        self._node_pid = 0
        self._pending: set[int] = set()
        self._forgotten: set[int] = set()
        self._sending = False
        self._returns: deque[Request] = deque()
        """Messages that return unwanted leases and reservations, sent after the current frame."""
        self._replies: dict[int, Reply] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.welcome = self._shake_hands(hello)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            with self._lock:
                self._end(f"cannot connect: {error.strerror}; `holdfast serve` starts a node")
        except OSError as error:
            with self._lock:
                self._end(f"no session: {error.strerror or error}")
        except BaseException:
            self._socket.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the connection has ended; then every call raises NodeGoneError."""
        return bool(self._closed_for)

    def connected(self) -> bool:
        """Return whether the connection stands, after receiving what has arrived; never waits."""
        with self._lock:
            if not self._closed_for and not self._receiving:
                with contextlib.suppress(NodeGoneError):
                    if readable_within(self._socket.fileno(), 0):  # keeps the GIL, as most often
                        self._drain()
            return not self._closed_for

    def send(self, message: Request) -> int:
        """Send a request; return its id for `poll`, `wait` or `forget`."""
        with self._lock:
            self._check_open()
            request_id = self._post(message)
            self._post_returns()
            return request_id

    def poll(self, request_id: int) -> Reply | None:
        """Return the reply if it has arrived, else None; never waits.

        Raises RefusedError with the node's message, as `wait` does.
        """
        with self._lock:
            self._check_open()
            if request_id not in self._replies and not self._receiving:
                self._drain()
            return self._take(request_id)

    def expect(self, request_id: int, within_s: float) -> Reply | None:
        """Return the reply if it arrives within this short time, else None.

        Holds the GIL for the first milliseconds. Raises as `poll` does.
        """
        began_s = now_s = time.monotonic()
        with self._lock:
            self._check_open()
            if request_id not in self._replies and not self._receiving:
                self._drain()
            # Each wait may receive replies to other requests only.
            while request_id not in self._replies and not self._receiving:
                if (left_s := began_s + within_s - now_s) <= 0:
                    break
                held_s = began_s + _HELD_S - now_s
                if held_s > 0:
                    self._receive_briefly(min(left_s, held_s))
                else:
                    self._receive(left_s)
                now_s = time.monotonic()
            return self._take(request_id)

    def wait(self, request_id: int, timeout_s: float) -> Reply:
        """Return the reply; if it does not arrive within `timeout_s`, close the client.

        The timeout excludes delays of this thread's wake-ups, because on a machine that stalls or
        is overloaded the node may not have run either. If the node is ready to run when the timeout
        ends, it may lack a processor, and the wait continues for up to `STARVED_S`.
        """
        due_s = time.monotonic()
        until_s = due_s + timeout_s
        with self._lock:
            self._check_open()
            if request_id not in self._replies and not self._receiving:
                self._receive_briefly(_SHORT_WAIT_S)
            while (reply := self._take(request_id)) is None:
                now_s = time.monotonic()
                if now_s - due_s > _LATE_S:
                    until_s += now_s - due_s
                left_s = until_s - now_s
                if left_s <= 0 and (left_s < -STARVED_S or not self.node_is_runnable()):
                    if not self._receiving:
                        self._drain()  # the reply may have arrived while this thread did not run
                    if request_id not in self._replies:
                        self._end(f"no answer within {timeout_s:g} s")
                    continue
                slice_s = min(left_s, _SLICE_S) if left_s > 0 else _STARVED_SLICE_S
                due_s = now_s + slice_s
                if self._receiving:
                    self._lock.wait(slice_s)
                else:
                    self._receive(slice_s)
                self._check_open()
            return reply

    def call(self, message: Request, kind: type[T], timeout_s: float) -> T:
        """Send a request and return its reply; raise ProtocolError if that is not a `kind`."""
        reply = self.wait(self.send(message), timeout_s)
        if not isinstance(reply, kind):
            raise ProtocolError(f"node {self.address} answered {reply!r:.200}, not {kind.__name__}")
        return reply

    def node_is_runnable(self) -> bool:
        """Return whether the node computes or waits for a processor; False if it sleeps.

        A node that is late because other programs keep every processor busy is healthy. The kernel
        accounts a thread's wait for a processor only when the wait ends, so the state of the node's
        main thread is read, which answers every request that needs no I/O. False also for a node in
        this process, and for one whose process id is not known.
        """
        if self._node_pid in (0, os.getpid()):
            return False
        try:
            stat = Path(f"/proc/{self._node_pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b") ")[2][:1] == b"R"

    def forget(self, request_id: int) -> None:
        """Discard a reply; a lease, reservation or lock that it grants is returned to the node."""
        with self._lock:
            if self._closed_for or request_id not in self._pending:
                return
            self._pending.remove(request_id)
            self._forgotten.add(request_id)
            reply = self._replies.pop(request_id, None)
            if reply is not None:
                self._discard(request_id, reply)

    def wait_gone(self) -> None:
        """Wait until the connection ends, from either side, also while no request is under way."""
        with self._lock:
            if self._closed_for:
                return
            watched = self._socket.dup()
        with watched:
            poll = select.poll()
            poll.register(watched, select.POLLRDHUP)
            poll.poll()

    def close(self, reason: str = "closed by the caller") -> None:
        """End the session; the node frees its leases and reservations.

        Later calls raise NodeGoneError with the reason.
        """
        with self._lock, contextlib.suppress(NodeGoneError):
            self._end(reason)

    # The methods below are called with `_lock` held.

    def _check_open(self) -> None:
        if self._closed_for:
            raise NodeGoneError(f"node {self.address}: {self._closed_for}")

    def _end(self, reason: str) -> NoReturn:
        if not self._closed_for:
            self._closed_for = reason
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the receiving thread
            if not self._receiving:
                self._socket.close()
            self._lock.notify_all()
        raise NodeGoneError(f"node {self.address}: {self._closed_for}")

    def _post(self, message: Request) -> int:
        request_id = self._last_id = self._last_id % REQUEST_ID_MAX + 1
        frame = bytes(encode(request_id, message))
        self._pending.add(request_id)
        deadline = time.monotonic() + min(SEND_S, self._timeout_s)
        self._sending = True
        while frame:
            try:
                sent = send_now(self._socket.fileno(), frame)
            except OSError as error:
                if not self._receiving:
                    self._drain()  # the node may have said why it ended the session
                self._end(f"send failed: {error}")
            frame = frame[sent:]
            if not frame:
                break
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._end(f"accepted no request for {min(SEND_S, self._timeout_s):g} s")
            # Receive replies while waiting, because the node may not read until it has sent them.
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT | (0 if self._receiving else select.POLLIN))
            poll.poll(1000 * left_s)
            if not self._receiving:
                self._drain()
        self._sending = False
        return request_id

    def _receive_briefly(self, within_s: float) -> None:
        """Receive replies that arrive within a few milliseconds, with the GIL held."""
        if readable_within(self._socket.fileno(), within_s):
            self._drain()

    def _drain(self) -> None:
        """Receive all bytes that have arrived, without waiting."""
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"receive failed: {error}")
            self._parse(data)
            if len(data) < RECEIVE_BYTES:
                return

    def _receive(self, left_s: float) -> None:
        """Receive once, for all waiting threads, with the lock released while it waits.

        One blocking call with the kernel's timeout (SO_RCVTIMEO) costs one hand-over of the GIL.
        """
        data: bytes | None = None
        failure = ""
        seconds, rest = divmod(max(left_s, _SHORTEST_WAIT_S), 1.0)
        timeval = _TIMEVAL.pack(int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._receiving = True
        self._lock.release()
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            pass
        except OSError as error:
            failure = f"receive failed: {error}"
        finally:
            self._lock.acquire()
            self._receiving = False
            self._lock.notify_all()
            if self._closed_for:
                self._socket.close()
        self._check_open()
        if failure:
            self._end(failure)
        if data is not None:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Deliver the replies in what was received; end if nothing was, because the node left."""
        if not data:
            self._end("the connection broke")
        self._reader.feed(data)
        try:
            while frame := self._reader.next():
                request_id, reply = frame
                if request_id in self._pending:
                    self._replies[request_id] = reply
                elif request_id in self._forgotten:
                    self._discard(request_id, reply)
                elif request_id == CONNECTION_ID and isinstance(reply, Refused):
                    self._end(reply.message)
                else:
                    raise ProtocolError(f"a reply to request {request_id}, which was not sent")
        except ProtocolError as error:
            self._end(str(error))

    def _discard(self, request_id: int, reply: Reply) -> None:
        """Return the lease, reservation or locks that a forgotten reply grants."""
        self._forgotten.remove(request_id)
        if isinstance(reply, Fetched) and reply.lease:
            self._returns.append(Release(reply.lease))
        elif isinstance(reply, Locked) and reply.chunks:
            self._returns.append(Unlock(reply.chunks))
        elif isinstance(reply, Reserved) and reply.ticket:
            self._returns.append(Abort(reply.ticket))
        self._post_returns()

    def _post_returns(self) -> None:
        while self._returns and not self._sending:
            request_id = self._post(self._returns.popleft())
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

    # Called by the constructor only.

    def _shake_hands(self, hello: Hello) -> Welcome:
        self._socket.settimeout(self._timeout_s)
        path = socket_path(self.address)
        owners = owners_of(path)
        self._socket.connect(path)
        listener = peer_of(self._socket)
        check_listener(listener.uid, path, owners)
        self._node_pid = listener.pid
        self._last_id += 1
        greeting = encode(self._last_id, hello)
        with contextlib.suppress(ConnectionError):  # a refusal may still be readable
            self._socket.sendall(greeting)
        descriptors: list[int] = []
        try:
            while (frame := self._reader.next()) is None:
                data, fds, _, _ = socket.recv_fds(
                    self._socket, RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
                descriptors += fds
                if not data:
                    raise ConnectionError("the node closed the connection")
                self._reader.feed(data)
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
                    self.arena = SharedMapping(descriptors[0], welcome.arena_bytes)
                except (ValueError, OverflowError) as error:
                    raise ProtocolError(
                        f"node {self.address} announced an arena of {welcome.arena_bytes} bytes, "
                        "but sent one of another size"
                    ) from error
        finally:
            for fd in descriptors:
                os.close(fd)
        return welcome


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def send_now(fd: int, data: bytes) -> int:
    """Send what the socket buffer takes, with the GIL held; return the bytes. Raises OSError."""
    sent: int = _libc.send(fd, data, len(data), _NOW)
    if sent >= 0:
        return sent
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return 0
    raise OSError(code, os.strerror(code))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def readable_within(fd: int, seconds: float) -> bool:
    """Wait for data to receive, with the GIL held; return whether there is any."""
    watched = _PollFd(fd, select.POLLIN, 0)
    whole, rest = divmod(seconds, 1.0)
    timeout = _TimeSpec(int(whole), int(rest * 1e9))
    found: int = _libc.ppoll(ctypes.byref(watched), 1, ctypes.byref(timeout), None)
    return found > 0
