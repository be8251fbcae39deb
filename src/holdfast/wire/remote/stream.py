"""Byte streams over TCP or TLS between nodes: whole buffers in few, large calls with time limits.

The sockets block; socket timeouts of the kernel end a call. A receive writes directly into the
given buffers and releases the GIL once for up to 8 MiB. Every error is an OSError: TimeoutError if
the time is over, ConnectionError if the other side is gone or was idle for too long. After an error
the stream must be closed.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from holdfast.address import HostPort
from holdfast.limits import KIB, MIB, PACE_BYTES, PACE_S

PIECE_BYTES = 8 * MIB
TLS_PIECE_BYTES = 256 * KIB
SLOW_PIECE_BYTES = 16 * KIB
"""Bytes encrypted and sent in one call, to a peer that receives quickly or slowly."""

PARTS_MAX = 256
"""Buffers in one call; the kernel allows 1,024."""

_TIMEVAL = struct.Struct("@ll")
_SHORTEST_WAIT_S = 0.001
_SLOW_S = 0.25
_LOOPBACK_CONGESTION = b"cubic"
"""Set on loopback only, because BBR, the default on some hosts, halves its throughput."""

PROGRESS_S = 0.25
"""Longest time between two progress reports: well below the 1.5 s of the shortest check."""

Buffer: TypeAlias = memoryview | bytes | bytearray
OnProgress: TypeAlias = Callable[[int], None]


class TimeLimit(Protocol):
    """The time limit of a transfer."""

    @abstractmethod
    def seconds(self, moved: int) -> float:
        """Return how long the next call may block, `moved` bytes after the last one.

        Raises TimeoutError if no time is left, ConnectionAbortedError if the limit is one of idle
        time.
        """


class Deadline:
    """A transfer must end by `at`, in `time.monotonic()`; `on_progress` gets the bytes moved.

    With `on_progress`, no call blocks longer than `PROGRESS_S`, so that slow progress is reported.
    """

    def __init__(self, at: float, on_progress: OnProgress | None = None) -> None:
        self.at = at
        self.on_progress = on_progress

    @classmethod
    def within(cls, seconds: float, on_progress: OnProgress | None = None) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(time.monotonic() + seconds, on_progress)

    @property
    def over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self.at

    def note(self, moved: int) -> None:
        """Report that `moved` bytes moved."""
        if self.on_progress is not None:
            self.on_progress(moved)

    def seconds(self, moved: int = 0) -> float:
        """Return the time left, at most `PROGRESS_S` with `on_progress`."""
        if moved:
            self.note(moved)
        left_s = self.at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s if self.on_progress is None else min(left_s, PROGRESS_S)


class IdleLimit:
    """A wait of at most `most_s` in steps of `step_s`, so that the socket timeout is constant.

    The end of an idle connection is no failure of a transfer, so it is a ConnectionAbortedError.
    """

    def __init__(self, most_s: float, step_s: float) -> None:
        self._until = time.monotonic() + most_s
        self._most_s = most_s
        self._step_s = step_s

    def seconds(self, moved: int) -> float:
        """Return the step, or the time left if that is less."""
        del moved
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise ConnectionAbortedError(f"nothing was received for {self._most_s:g} s")
        return min(left_s, self._step_s)


class ProgressLimit:
    """A transfer must move at least `nbytes` in every `within_s` seconds."""

    def __init__(self, nbytes: int = PACE_BYTES, within_s: float = PACE_S) -> None:
        self._nbytes = nbytes
        self._within_s = within_s
        self._since = time.monotonic()
        self._moved = 0

    def seconds(self, moved: int) -> float:
        """Return the time left of the current period."""
        self._moved += moved
        now = time.monotonic()
        if self._moved >= self._nbytes:
            self._since, self._moved = now, 0
        left_s = self._since + self._within_s - now
        if left_s <= 0:
            raise TimeoutError(
                f"{self._moved} bytes moved in {self._within_s:g} s; at least {self._nbytes} must"
            )
        return left_s

    def rest(self, seconds: float) -> None:
        """Exclude time in which this side did not transfer."""
        self._since += seconds


class Stream(ABC):
    """A connection's byte stream. One thread at a time; any thread may call `cut`."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    @abstractmethod
    def send(self, parts: Sequence[Buffer], limit: TimeLimit) -> None:
        """Send all parts, in order."""

    @abstractmethod
    def receive(self, parts: Sequence[memoryview], limit: TimeLimit) -> None:
        """Fill all parts, in order."""

    def arrives(self, wait_s: float) -> bool:
        """Wait up to `wait_s` and return whether there is something to receive."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLHUP | select.POLLERR)
        if poll.poll(0):
            return True
        time.sleep(wait_s)  # poll has a resolution of 1 ms
        return bool(poll.poll(0))

    def drains(self, wait_s: float) -> bool:
        """Wait up to `wait_s` and return whether more can be sent without blocking."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(1e3 * wait_s))

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    def cut(self) -> None:
        """End the connection at once and wake the thread that waits for it."""
        # Not SSLSocket.shutdown, which drops the TLS state that another thread may be using.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket; only by the thread that uses the stream."""
        self._socket.close()


class PlainStream(Stream):
    """Plain TCP, with scatter and gather by the kernel."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        connected.settimeout(None)
        self._limits_s: dict[int, float] = {}

    def send(self, parts: Sequence[Buffer], limit: TimeLimit) -> None:
        """Send all parts; one call if the time allows."""
        left, moved = [memoryview(part) for part in parts if part], 0
        while left:
            self._limit(socket.SO_SNDTIMEO, limit.seconds(moved))
            try:
                moved = self._socket.sendmsg(left[:PARTS_MAX])
            except BlockingIOError:
                moved = 0
            left = _rest_of(left, moved)

    def receive(self, parts: Sequence[memoryview], limit: TimeLimit) -> None:
        """Fill all parts, 8 MiB a call."""
        moved = 0
        for piece in pieces(parts, PIECE_BYTES):
            left = piece
            while left:
                self._limit(socket.SO_RCVTIMEO, limit.seconds(moved))
                try:
                    if len(left) == 1:
                        moved = self._socket.recv_into(left[0], 0, socket.MSG_WAITALL)
                    else:
                        moved = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
                except BlockingIOError:
                    moved = 0
                    continue
                if not moved:
                    raise ConnectionResetError("the other side closed the connection")
                left = _rest_of(left, moved)

    def receive_some(self, into: memoryview, limit: TimeLimit) -> int:
        """Receive what has arrived, at least one byte; return the number of bytes."""
        while True:
            self._limit(socket.SO_RCVTIMEO, limit.seconds(0))
            with contextlib.suppress(BlockingIOError):
                if not (moved := self._socket.recv_into(into)):
                    raise ConnectionResetError("the other side closed the connection")
                return moved

    def _limit(self, option: int, wait_s: float) -> None:
        """Set a socket timeout if it differs by more than 1 ms: setting it costs a system call."""
        if abs(wait_s - self._limits_s.get(option, -1.0)) < _SHORTEST_WAIT_S:
            return
        self._limits_s[option] = wait_s
        seconds, rest = divmod(max(wait_s, _SHORTEST_WAIT_S), 1.0)
        timeval = _TIMEVAL.pack(int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)


class TlsStream(Stream):
    """TLS; the library moves 16 KiB a call. Owns the socket. Call `shake_hands` first.

    `name`: the host that a client expects; None for the server's side.
    """

    _socket: ssl.SSLSocket

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, name: str | None = None
    ) -> None:
        super().__init__(
            context.wrap_socket(
                connected,
                server_side=name is None,
                do_handshake_on_connect=False,
                server_hostname=name,
            )
        )
        self._limit_s = -1.0
        self._piece_bytes = SLOW_PIECE_BYTES

    def shake_hands(self, deadline: Deadline) -> None:
        """Start TLS. Raises OSError, which includes ssl.SSLError."""
        self._socket.settimeout(deadline.seconds())
        self._socket.do_handshake()

    def send(self, parts: Sequence[Buffer], limit: TimeLimit) -> None:
        """Send all parts, up to 256 KiB a call.

        The bytes moved are known only at a call's end. So calls to a slow peer are small, so that
        the time limit sees its progress.
        """
        moved = 0
        for part in parts:
            left = memoryview(part)
            while left:
                piece, took_s, sent = left[: self._piece_bytes], 0.0, False
                while not sent:
                    self._limit(limit.seconds(moved))
                    moved, begun = 0, time.monotonic()
                    with contextlib.suppress(TimeoutError):  # partly sent: TLS must repeat the call
                        moved = self._socket.send(piece)
                        sent = True
                    took_s += time.monotonic() - begun
                left = left[moved:]
                if took_s > _SLOW_S:
                    self._piece_bytes = SLOW_PIECE_BYTES
                elif self._piece_bytes < TLS_PIECE_BYTES:
                    self._piece_bytes *= 2

    def receive(self, parts: Sequence[memoryview], limit: TimeLimit) -> None:
        """Fill all parts. A piece takes many calls, so each does little."""
        # `recv_into` calls this method: calling it directly saves a Python call per 16 KiB.
        receive: Callable[[int, memoryview], int] = self._socket.read  # type: ignore[assignment]
        now, moved = time.monotonic, 0
        for piece in pieces(parts, TLS_PIECE_BYTES):
            for part in piece:
                at, size, stale_at = 0, len(part), 0.0
                while at < size:
                    if now() >= stale_at:
                        self._limit(limit.seconds(moved))
                        moved, stale_at = 0, now() + _SHORTEST_WAIT_S
                    try:
                        nbytes = receive(size - at, part[at:])
                    except TimeoutError:  # `limit.seconds` decides whether this was too long
                        stale_at = 0.0
                        continue
                    if not nbytes:
                        raise ConnectionResetError("the other side closed the connection")
                    at += nbytes
                    moved += nbytes

    def arrives(self, wait_s: float) -> bool:
        # The library may hold decrypted bytes that the kernel no longer has.
        return self._socket.pending() > 0 or super().arrives(wait_s)

    def _limit(self, wait_s: float) -> None:
        """Set the timeout if it differs by more than 1 ms: setting it costs a system call."""
        if abs(wait_s - self._limit_s) > _SHORTEST_WAIT_S:
            self._limit_s = max(wait_s, _SHORTEST_WAIT_S)
            self._socket.settimeout(self._limit_s)


def first_to_arrive(streams: Sequence[PlainStream], wait_s: float) -> PlainStream | None:
    """Return one of some streams that has something to receive; None after `wait_s` without any.

    A stream whose connection has ended counts: its next call raises.
    """
    poll, by_fd = select.poll(), {stream.fileno(): stream for stream in streams}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    found = poll.poll(1e3 * max(0.0, wait_s))
    return by_fd[found[0][0]] if found else None


def dial(endpoint: HostPort, deadline: Deadline) -> socket.socket:
    """Connect to the first address of an endpoint that answers, each in its share of the time.

    Raises OSError if none does, TimeoutError at the deadline.
    """
    found = [endpoint]
    if not endpoint.is_numeric:
        # Look the name up in a thread, because a name server may exceed the deadline.
        answer: queue.SimpleQueue[list[HostPort] | OSError] = queue.SimpleQueue()

        def resolve() -> None:
            try:
                rows = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
                answer.put([HostPort(str(place[0]), endpoint.port) for *_, place in rows])
            except OSError as error:
                answer.put(error)
            except UnicodeError as error:
                answer.put(OSError(f"{endpoint.host!r} is not a host name: {error}"))

        threading.Thread(target=resolve, name="holdfast-resolve", daemon=True).start()
        try:
            resolved = answer.get(timeout=deadline.seconds())
        except queue.Empty as error:
            raise TimeoutError(f"{endpoint.host!r} was not found in time") from error
        if isinstance(resolved, OSError):
            raise resolved
        found = resolved
    failed: OSError = ConnectionRefusedError(f"{endpoint.host!r} has no address")
    for number, address in enumerate(found):
        try:
            return socket.create_connection(address, deadline.seconds() / (len(found) - number))
        except OSError as error:
            failed = error
    raise failed


def tune(connected: socket.socket, endpoint: HostPort) -> None:
    """Set socket options for request-reply messages followed by bulk data."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if endpoint.is_loopback:
        with contextlib.suppress(OSError):  # optional: a kernel may lack it
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)


def start_tls(
    connected: socket.socket, context: ssl.SSLContext, deadline: Deadline, name: str | None = None
) -> TlsStream:
    """Wrap a socket and do the TLS handshake; `name`: the host that a client expects.

    Raises OSError, which includes ssl.SSLError, and closes the socket then.
    """
    stream = TlsStream(connected, context, name)
    try:
        stream.shake_hands(deadline)
    except BaseException:
        stream.close()
        raise
    return stream


def pieces(parts: Sequence[memoryview], nbytes: int) -> list[list[memoryview]]:
    """Divide parts into pieces of at most `nbytes` and `PARTS_MAX` buffers."""
    if len(parts) <= PARTS_MAX and sum(map(len, parts)) <= nbytes:
        whole = [*filter(None, parts)]
        return [whole] if whole else []
    found: list[list[memoryview]] = []
    piece: list[memoryview] = []
    free = nbytes
    for part in parts:
        left = part
        while left:
            taken, left = left[:free], left[free:]
            piece.append(taken)
            free -= len(taken)
            if not free or len(piece) == PARTS_MAX:
                found.append(piece)
                piece, free = [], nbytes
    return [*found, piece] if piece else found


def _rest_of(parts: list[memoryview], moved: int) -> list[memoryview]:
    """Return parts without their first `moved` bytes."""
    if len(parts) == 1:
        return [parts[0][moved:]] if moved < len(parts[0]) else []
    for i, part in enumerate(parts):
        if moved < len(part):
            return [part[moved:], *parts[i + 1 :]]
        moved -= len(part)
    return []
