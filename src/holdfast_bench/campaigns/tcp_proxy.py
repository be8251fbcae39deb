"""A TCP proxy on this machine, for campaigns that disturb the traffic between two nodes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from holdfast.address import HostPort, tcp_endpoint


class TcpProxy:
    """Forwards connections to the address given to `to`; subclasses disturb them."""

    def __init__(self) -> None:
        self._to = HostPort("", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = self._start(self._accept)

    def to(self, address: str) -> str:
        """Start forwarding to `address`; return this proxy's address."""
        self._to = tcp_endpoint(address)
        return "tcp://{}:{}".format(*self._listener.getsockname())

    def cut(self) -> None:
        """Close every connection."""
        with self._lock:
            ends, self._open = self._open, set()
        _shut_down(*ends)

    def close(self) -> None:
        """Close every connection, and wait until forwarding has ended."""
        self._closing.set()
        _shut_down(self._listener)  # wakes accept()
        self._accepting.join()
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *values: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=values, daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                if not self._join(client):
                    client.close()

    def _join(self, client: socket.socket) -> bool:
        """Connect to the target and forward; return False if that is refused."""
        try:
            target = socket.create_connection(self._to, 1.0)
        except OSError:
            return False
        target.settimeout(None)
        for end in (client, target):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {client, target}
        self._start(self._forward, client, target, True)
        self._start(self._forward, target, client, False)
        return True

    def _forward(self, source: socket.socket, sink: socket.socket, sending: object) -> None:
        """Forward one direction, to the target if `sending`, until a connection ends."""
        raise NotImplementedError

    def _end(self, source: socket.socket, *sinks: socket.socket) -> None:
        """Close a source, and end what its sinks send and receive."""
        with self._lock:
            self._open -= {source, *sinks}
        _shut_down(source, *sinks)
        source.close()


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
