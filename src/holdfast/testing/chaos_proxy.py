"""What stands between a node and a target in the chaos campaign: TCP that is slow, mute or cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Literal, TypeAlias

Mood: TypeAlias = Literal["well", "slow", "mute", "cut"]
"""`slow`: 64 KiB/s each way. `mute`: accepts, and lets no byte through. `cut`: resets."""

SLOW_BYTES_PER_S = 64 << 10
_PIECE_BYTES = 64 << 10
_SLOW_PIECE_BYTES = 2 << 10
_LOOK_S = 0.02


class ChaosProxy:
    """Forwards connections to a port of this machine, as its mood is."""

    def __init__(self, port: int) -> None:
        self.mood: Mood = "well"
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self.address = "tcp://{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, name="chaos-accept", daemon=True).start()

    def cut(self) -> None:
        """End every connection now."""
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                if not self._join(near):
                    near.close()

    def _join(self, near: socket.socket) -> bool:
        """Connect the far side; False where it is not there, or must not be."""
        if self.mood == "cut":
            return False
        try:
            far = socket.create_connection(self._to, 1.0)
        except OSError:
            return False
        far.settimeout(None)
        with self._lock:
            self._open |= {near, far}
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()
        return True

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Move bytes one way until either end is gone; then both are."""
        with contextlib.suppress(OSError):
            while not self._closing:
                slow = self.mood == "slow"
                data = source.recv(_SLOW_PIECE_BYTES if slow else _PIECE_BYTES)
                while self.mood == "mute" and not self._closing:
                    time.sleep(_LOOK_S)
                if slow:
                    time.sleep(len(data) / SLOW_BYTES_PER_S)
                if not data or self.mood == "cut":
                    break
                sink.sendall(data)
        with self._lock:
            self._open -= {source, sink}
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
