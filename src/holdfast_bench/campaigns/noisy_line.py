"""A TCP proxy on this machine that damages one burst of bytes when armed."""

from __future__ import annotations

import contextlib
import random
import socket

from holdfast_bench.campaigns.tcp_proxy import TcpProxy

_PIECE_BYTES = 64 << 10
_BURST_MAX = 8


class NoisyLine(TcpProxy):
    """Forwards connections; `arm` damages one burst of bytes in one direction.

    The burst begins at a random offset of the bytes that follow. The damage is flipped bits, a
    closed connection, bytes left out, or bytes repeated. `struck` is true after the damage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sending = False
        self._after = -1
        self._rng = random.Random(0)  # noqa: S311 - rounds must be repeatable
        self.struck = False

    def arm(self, sending: object, rng: random.Random) -> None:
        """Damage one of the next bytes, `sending` to the target or back from it."""
        with self._lock:
            self._sending, self._rng, self.struck = bool(sending), rng, False
            self._after = int(2 ** rng.uniform(0, 16))

    def disarm(self) -> None:
        """Forward everything unchanged."""
        with self._lock:
            self._after = -1

    def _forward(self, source: socket.socket, sink: socket.socket, sending: object) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                sink.sendall(self._damaged(data, sending))
        self._end(source, sink)

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
