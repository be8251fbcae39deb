"""A line between two TCP endpoints on this machine that damages bytes when it is told to."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

from holdfast.wire.address import tcp_endpoint

_CHUNK_BYTES = 64 << 10
_BURST_MAX = 8


class NoisyLine:
    """Forwards connections to one address; armed, it damages one burst of bytes, then no more.

    The damage falls on a byte so many bytes into what travels in one direction: flipped bits, a
    cut connection, bytes left out, or bytes said twice.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._to = ("", 0)
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._sending = False
        self._after = -1
        self._dice = random.Random(0)  # noqa: S311 - noise must replay
        self.struck = False

    def to(self, address: str) -> str:
        """Begin to forward to `address`; return the address of this end."""
        self._to = (tcp_endpoint(address).host, tcp_endpoint(address).port)
        self._start(self._accept)
        host, port = self._listener.getsockname()
        return f"tcp://{host}:{port}"

    def arm(self, sending: object, dice: random.Random) -> None:
        """Damage something soon, on the way to the target or back."""
        with self._lock:
            self._sending, self._dice, self.struck = bool(sending), dice, False
            self._after = int(2 ** dice.uniform(0, 16))

    def disarm(self) -> None:
        """Let everything pass."""
        with self._lock:
            self._after = -1

    def close(self) -> None:
        """Cut every connection; return when nothing is forwarded any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in sockets:
            each.close()

    def _start(self, work: object, *values: object) -> None:
        thread = threading.Thread(target=work, args=values, daemon=True)  # type: ignore[arg-type]
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {near, far}
            self._start(self._forward, near, far, True)
            self._start(self._forward, far, near, False)

    def _forward(self, source: socket.socket, sink: socket.socket, sending: object) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                sink.sendall(self._noise(data, sending))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sockets.discard(source)
        source.close()

    def _noise(self, data: bytes, sending: object) -> bytes:
        """Return what arrives; raise OSError where the connection is cut."""
        with self._lock:
            if self._after < 0 or bool(sending) is not self._sending:
                return data
            if self._after >= len(data):
                self._after -= len(data)
                return data
            at, self._after, self.struck, dice = self._after, -1, True, self._dice
        burst = dice.randint(1, _BURST_MAX)
        match dice.randrange(6):
            case 0:
                raise ConnectionResetError("cut")
            case 1:
                return data[:at] + data[at + burst :]
            case 2:
                return data[: at + burst] + data[at:]
            case _:
                noisy = bytearray(data)
                for each in range(at, min(at + burst, len(data))):
                    noisy[each] ^= dice.randrange(1, 256)
                return bytes(noisy)
