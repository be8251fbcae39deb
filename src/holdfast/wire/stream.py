"""Bytes over TCP between nodes: whole buffers in few, large calls, each with a limit on its time.

The sockets block; the kernel's own time-outs end a call. A receive goes straight into the buffers
it is given, with one hand-over of the interpreter for up to 8 MiB. Every error is an OSError:
TimeoutError where the time ran out, ConnectionError where the other side has gone. After either
the stream is of no more use.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from holdfast.limits import KIB, MIB, PACE_BYTES, PACE_S
from holdfast.wire.address import HostPort

PIECE_BYTES = 8 * MIB
SEALED_PIECE_BYTES = 256 * KIB
SLOW_PIECE_BYTES = 16 * KIB
"""What is sealed and sent in one call, to a peer that takes it quickly or slowly."""

PARTS_MAX = 256
"""Buffers in one call; the kernel allows 1,024."""

_TIMEVAL = struct.Struct("@ll")
_SHORTEST_WAIT_S = 0.001
_SLOW_S = 0.25
_LOOPBACK_CONGESTION = b"cubic"
"""BBR, where it is the default, paces loopback to half its speed; elsewhere it is left alone."""

LOOK_UP_S = 0.25
"""How often a transfer tells what moved, at the least: often enough for who judges in 1.5 s."""

Buffer: TypeAlias = memoryview | bytes | bytearray
Heard: TypeAlias = Callable[[int], None]


class Pace(Protocol):
    """How long a transfer may go on."""

    def seconds(self, moved: int) -> float:
        """Return how long the next call may block, `moved` bytes after the last one.

        Raises TimeoutError once that is no time at all.
        """
        ...


class Deadline:
    """A transfer must be over by a moment in `time.monotonic()`; `heard` is told what moved.

    Where somebody is told no call blocks for long, so that they hear of bytes as they trickle.
    """

    def __init__(self, at: float, heard: Heard | None = None) -> None:
        self.at = at
        self.heard = heard

    @classmethod
    def within(cls, seconds: float, heard: Heard | None = None) -> Deadline:
        """Return the deadline so many seconds from now."""
        return cls(time.monotonic() + seconds, heard)

    @property
    def over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self.at

    def note(self, moved: int) -> None:
        """Tell who wants to hear of it that so many bytes moved."""
        if self.heard is not None:
            self.heard(moved)

    def seconds(self, moved: int = 0) -> float:
        """Return what is left, or how long until somebody wants to hear what moved."""
        if moved:
            self.note(moved)
        left_s = self.at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s if self.heard is None else min(left_s, LOOK_UP_S)


class Idle:
    """Something may take its time to begin; looked at every so often, so that a time-out stays."""

    def __init__(self, most_s: float, step_s: float) -> None:
        self._until = time.monotonic() + most_s
        self._most_s = most_s
        self._step_s = step_s

    def seconds(self, moved: int) -> float:
        """Return the step, or what is left if that is less."""
        del moved
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"nothing was said for {self._most_s:g} s")
        return min(left_s, self._step_s)


class Progress:
    """A transfer must move at least so many bytes in every so many seconds."""

    def __init__(self, nbytes: int = PACE_BYTES, within_s: float = PACE_S) -> None:
        self._nbytes = nbytes
        self._within_s = within_s
        self._since = time.monotonic()
        self._moved = 0

    def seconds(self, moved: int) -> float:
        """Return what is left of the time in which enough must move."""
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
        """Leave out time that the other side is not to blame for."""
        self._since += seconds


class Stream(Protocol):
    """One connection's bytes. One thread sends and receives at a time; `cut` is for any."""

    def send(self, parts: Sequence[Buffer], pace: Pace) -> None:
        """Send all parts, in order."""
        ...

    def receive(self, parts: Sequence[memoryview], pace: Pace) -> None:
        """Fill all parts, in order."""
        ...

    def arrives(self, wait_s: float) -> bool:
        """Return whether there is something to receive, after waiting for it that long."""
        ...

    def drains(self, wait_s: float) -> bool:
        """Return whether more can be sent without waiting, after waiting for it that long."""
        ...

    def cut(self) -> None:
        """End the connection at once and wake whoever waits for it."""
        ...

    def close(self) -> None:
        """Release the socket; only by the thread that uses the stream."""
        ...


class PlainStream:
    """TCP as it is: scatter and gather by the kernel."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        self._socket = connected
        self._limits_s: dict[int, float] = {}

    def send(self, parts: Sequence[Buffer], pace: Pace) -> None:
        """Send all parts; one call if the time allows."""
        left, moved = [memoryview(part) for part in parts if part], 0
        while left:
            self._limit(socket.SO_SNDTIMEO, pace.seconds(moved))
            try:
                moved = self._socket.sendmsg(left[:PARTS_MAX])
            except BlockingIOError:
                moved = 0
            left = _behind(left, moved)

    def receive(self, parts: Sequence[memoryview], pace: Pace) -> None:
        """Fill all parts, 8 MiB a call."""
        moved = 0
        for piece in pieces(parts, PIECE_BYTES):
            left = piece
            while left:
                self._limit(socket.SO_RCVTIMEO, pace.seconds(moved))
                moved = self._receive(left)
                left = _behind(left, moved)

    def arrives(self, wait_s: float) -> bool:
        """Ask the kernel."""
        return _readable(self._socket, wait_s)

    def drains(self, wait_s: float) -> bool:
        """Ask the kernel."""
        return _writable(self._socket, wait_s)

    def cut(self) -> None:
        """Shut both directions down."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive(self, parts: list[memoryview]) -> int:
        try:
            if len(parts) == 1:
                moved = self._socket.recv_into(parts[0], 0, socket.MSG_WAITALL)
            else:
                moved = self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            return 0
        if not moved:
            raise ConnectionResetError("the other side closed the connection")
        return moved

    def _limit(self, option: int, wait_s: float) -> None:
        """Set a time-out unless it is about right: setting it costs a system call."""
        if abs(wait_s - self._limits_s.get(option, -1.0)) < _SHORTEST_WAIT_S:
            return
        self._limits_s[option] = wait_s
        seconds, rest = divmod(max(wait_s, _SHORTEST_WAIT_S), 1.0)
        timeval = _TIMEVAL.pack(int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)


class SealedStream:
    """TLS; the library moves 16 KiB a call. Of use after `shake_hands`."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self._limit_s = -1.0
        self._piece_bytes = SLOW_PIECE_BYTES

    def shake_hands(self, deadline: Deadline) -> None:
        """Start TLS. Raises OSError, of which ssl.SSLError is one."""
        self._socket.settimeout(deadline.seconds())
        self._socket.do_handshake()

    def send(self, parts: Sequence[Buffer], pace: Pace) -> None:
        """Send all parts, up to 256 KiB a call: what moved is known at its end only.

        So calls are small where the last ones were slow: a pace must see what a slow peer takes.
        """
        moved = 0
        for part in parts:
            left = memoryview(part)
            while left:
                piece, took_s, sent = left[: self._piece_bytes], 0.0, False
                while not sent:
                    self._limit(pace.seconds(moved))
                    moved, begun = 0, time.monotonic()
                    with contextlib.suppress(TimeoutError):  # part of it may be under way: again
                        moved = self._socket.send(piece)
                        sent = True
                    took_s += time.monotonic() - begun
                left = left[moved:]
                self._adapt(took_s)

    def receive(self, parts: Sequence[memoryview], pace: Pace) -> None:
        """Fill all parts; a piece takes many calls, so each does as little as it can."""
        # What `recv_into` calls: one Python call less for every 16 KiB.
        receive: Callable[[int, memoryview], int] = self._socket.read  # type: ignore[assignment]
        now, moved = time.monotonic, 0
        for piece in pieces(parts, SEALED_PIECE_BYTES):
            for part in piece:
                at, size, stale_at = 0, len(part), 0.0
                while at < size:
                    if now() >= stale_at:
                        self._limit(pace.seconds(moved))
                        moved, stale_at = 0, now() + _SHORTEST_WAIT_S
                    try:
                        nbytes = receive(size - at, part[at:])
                    except TimeoutError:  # whether that was too long is for the pace to say
                        stale_at = 0.0
                        continue
                    if not nbytes:
                        raise ConnectionResetError("the other side closed the connection")
                    at += nbytes
                    moved += nbytes

    def arrives(self, wait_s: float) -> bool:
        """Look into the library's own buffer, then ask the kernel."""
        return self._socket.pending() > 0 or _readable(self._socket, wait_s)

    def drains(self, wait_s: float) -> bool:
        """Ask the kernel."""
        return _writable(self._socket, wait_s)

    def cut(self) -> None:
        """Shut both directions down; what is under way in another thread ends as it would."""
        with contextlib.suppress(OSError):  # the library's own takes its state away from them
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _adapt(self, took_s: float) -> None:
        """Send less at once after a slow call, and twice as much after a quick one."""
        if took_s > _SLOW_S:
            self._piece_bytes = SLOW_PIECE_BYTES
        elif self._piece_bytes < SEALED_PIECE_BYTES:
            self._piece_bytes *= 2

    def _limit(self, wait_s: float) -> None:
        """Set the time-out unless it is about right: setting it costs a system call."""
        if abs(wait_s - self._limit_s) > _SHORTEST_WAIT_S:
            self._limit_s = max(wait_s, _SHORTEST_WAIT_S)
            self._socket.settimeout(self._limit_s)


def _readable(connected: socket.socket, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN | select.POLLHUP | select.POLLERR)
    if poll.poll(0):
        return True
    time.sleep(wait_s)  # polls wait whole milliseconds
    return bool(poll.poll(0))


def _writable(connected: socket.socket, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLOUT | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(1e3 * wait_s))


def tune(connected: socket.socket, endpoint: HostPort) -> None:
    """Set what suits requests that wait for answers, and bulk that follows them."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if endpoint.is_loopback:
        with contextlib.suppress(OSError):  # a kernel without it is none the worse
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)


def wrap(
    connected: socket.socket, context: ssl.SSLContext, name: str | None = None
) -> SealedStream:
    """Take a socket over for TLS; `name`: the host that a client expects."""
    return SealedStream(
        context.wrap_socket(
            connected,
            server_side=name is None,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
            server_hostname=name,
        )
    )


def seal(
    connected: socket.socket, context: ssl.SSLContext, deadline: Deadline, name: str | None = None
) -> SealedStream:
    """Take a socket over and start TLS; `name`: the host that a client expects.

    Raises OSError, of which ssl.SSLError is one; the socket is closed then.
    """
    stream = wrap(connected, context, name)
    try:
        stream.shake_hands(deadline)
    except BaseException:
        stream.close()
        raise
    return stream


def pieces(parts: Sequence[memoryview], nbytes: int) -> list[list[memoryview]]:
    """Group and cut parts into pieces of at most `nbytes` and a number of buffers."""
    if len(parts) <= PARTS_MAX and sum(map(len, parts)) <= nbytes:
        whole = [*filter(None, parts)]
        return [whole] if whole else []
    found: list[list[memoryview]] = []
    piece: list[memoryview] = []
    room = nbytes
    for part in parts:
        left = part
        while left:
            taken, left = left[:room], left[room:]
            piece.append(taken)
            room -= len(taken)
            if not room or len(piece) == PARTS_MAX:
                found.append(piece)
                piece, room = [], nbytes
    return [*found, piece] if piece else found


def _behind(parts: list[memoryview], moved: int) -> list[memoryview]:
    """Return what is left of parts after their first `moved` bytes."""
    if len(parts) == 1:
        return [parts[0][moved:]] if moved < len(parts[0]) else []
    for i, part in enumerate(parts):
        if moved < len(part):
            return [part[moved:], *parts[i + 1 :]]
        moved -= len(part)
    return []
