"""A TCP proxy on this machine that damages one burst of bytes when armed."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

from holdfast.wire.address import tcp_endpoint

_CHUNK_BYTES = 64 << 10
_BURST_MAX = 8


class NoisyLine:
    """Forwards connections to one address; `arm` damages one burst of bytes in one direction.

    The burst begins at a random offset of the bytes that follow. The damage is flipped bits, a
    closed connection, bytes left out, or bytes repeated. `struck` is true after the damage.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._to = ("", 0)
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._sending = False
        self._after = -1
        self._rng = random.Random(0)  # noqa: S311 - rounds must be repeatable
        self.struck = False

    def to(self, address: str) -> str:
        """Start forwarding to `address`; return this proxy's address."""
        self._to = (tcp_endpoint(address).host, tcp_endpoint(address).port)
        self._start(self._accept)
        host, port = self._listener.getsockname()
        return f"tcp://{host}:{port}"

    def arm(self, sending: object, rng: random.Random) -> None:
        """Damage one of the next bytes, `sending` to the target or back from it."""
        with self._lock:
            self._sending, self._rng, self.struck = bool(sending), rng, False
            self._after = int(2 ** rng.uniform(0, 16))

    def disarm(self) -> None:
        """Forward everything unchanged."""
        with self._lock:
            self._after = -1

    def close(self) -> None:
        """Close every connection, and wait until forwarding has ended."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
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
                client = self._listener.accept()[0]
            except OSError:
                return  # closed
            try:
                target = socket.create_connection(self._to)
            except OSError:
                client.close()
                continue
            for each in (client, target):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, target}
            self._start(self._forward, client, target, True)
            self._start(self._forward, target, client, False)

    def _forward(self, source: socket.socket, sink: socket.socket, sending: object) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                sink.sendall(self._damaged(data, sending))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sockets.discard(source)
        source.close()

    def _damaged(self, data: bytes, sending: object) -> bytes:
        """Return the bytes to forward. Raises OSError to close the connection."""
        with self._lock:
            if self._after < 0 or bool(sending) is not self._sending:
                return data
            if self._after >= len(data):
                self._after -= len(data)
                return data
            at, self._after, self.struck, rng = self._after, -1, True, self._rng
        burst = rng.randint(1, _BURST_MAX)
        match rng.randrange(6):
            case 0:
                raise ConnectionResetError("cut")
            case 1:
                return data[:at] + data[at + burst :]
            case 2:
                return data[: at + burst] + data[at:]
            case _:
                noisy = bytearray(data)
                for each in range(at, min(at + burst, len(data))):
                    noisy[each] ^= rng.randrange(1, 256)
                return bytes(noisy)
