"""A TCP proxy before a target in the chaos campaign: it delays, drops or alters traffic."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections import deque
from typing import Literal, TypeAlias

from holdfast.errors import ProtocolError
from holdfast.wire.frame import HEADER_BYTES, encode, read_head
from holdfast.wire.remote.messages import TARGET_PROTOCOL, Challenge
from holdfast_bench.campaigns.tcp_proxy import TcpProxy

Mood: TypeAlias = Literal[
    "well", "late", "slow", "dribble", "mute", "half open", "cut", "garbage", "stale", "other"
]
"""How a proxy treats traffic. `late`: delays each direction by 0.1 s. `slow`, `dribble`: 64 KiB/s,
1 KiB/s in each direction. `mute`: accepts connections and forwards nothing. `half open`: as `mute`,
and these connections stay dead afterwards. `cut`: closes connections. `garbage`: random bytes in
answers. `stale`: repeats answers, or replaces them with earlier ones. `other`: answers with another
protocol version. `well`: forwards unchanged."""

LATE_S = 0.1
BYTES_PER_S = {"slow": 64 << 10, "dribble": 1 << 10}
ANEW: frozenset[Mood] = frozenset({"cut", "stale", "other"})
"""Moods that apply to new connections only; earlier ones are closed."""

_PIECE_BYTES = 64 << 10
_PIECES_PER_S = 32
_PAUSE_S = 0.02
"""The first piece after a pause of this length is delayed in the mood `late`."""

_POLL_S = 0.02
_HANDSHAKE_FRAMES = 2
_KEPT = 64
_NONCE_BYTES = 16
_HEADS_BYTES = 4 << 10


class ChaosProxy(TcpProxy):
    """Forwards connections to a port of this machine, according to its `mood`."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.mood: Mood = "well"
        self._kept: deque[bytes] = deque(maxlen=_KEPT)
        """Recent answers, as whole frames."""
        self.address = self.to(f"tcp://127.0.0.1:{port}")

    def _join(self, client: socket.socket) -> bool:
        if self.mood == "other":
            with contextlib.suppress(OSError):
                client.sendall(encode(0, Challenge(TARGET_PROTOCOL + 1, os.urandom(_NONCE_BYTES))))
        return self.mood not in ("other", "cut") and super()._join(client)

    def _forward(self, source: socket.socket, sink: socket.socket, sending: object) -> None:
        """Forward one direction until a connection ends; close both ends, unless half open."""
        answers = None if sending or self.mood != "stale" else _Answers(self._kept)
        dead = False
        with contextlib.suppress(OSError, ProtocolError):
            while not self._closing.is_set():
                piece_bytes = BYTES_PER_S.get(self.mood, _PIECES_PER_S * _PIECE_BYTES)
                begun_s = time.monotonic()
                data = source.recv(piece_bytes // _PIECES_PER_S)
                while self.mood == "mute" and not self._closing.wait(_POLL_S):
                    pass
                dead = dead or self.mood == "half open"
                if not data or self.mood == "cut":
                    break
                self._delay(len(data), time.monotonic() - begun_s)
                if self.mood == "garbage" and not sending:
                    data = _randomized(data)
                if answers:
                    data = answers.replace(data, stale=self.mood == "stale")
                if not dead:
                    sink.sendall(data)
        self._end(source, *([] if dead else [sink]))

    def _delay(self, nbytes: int, waited_s: float) -> None:
        """Wait as long as the mood delays a piece that arrived after `waited_s`, or for the end."""
        if self.mood in BYTES_PER_S:
            self._closing.wait(nbytes / BYTES_PER_S[self.mood])
        elif self.mood == "late" and waited_s > _PAUSE_S:
            self._closing.wait(LATE_S)


class _Answers:
    """The answers on one connection, as whole frames; recent ones are kept for `stale`."""

    def __init__(self, kept: deque[bytes]) -> None:
        self._kept = kept
        self._waiting = bytearray()
        self._frames = 0

    def replace(self, data: bytes, *, stale: bool) -> bytes:
        """Take received bytes; return the frames to forward, if `stale` with some replaced."""
        self._waiting += data
        forwarded = b""
        while len(self._waiting) >= HEADER_BYTES:
            head = read_head(bytes(self._waiting[:HEADER_BYTES]))
            size = HEADER_BYTES + head.body_bytes + head.payload_bytes
            if len(self._waiting) < size:
                break
            frame = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._frames += 1
            if stale and self._frames > _HANDSHAKE_FRAMES:
                forwarded += self._stale(frame, head.request_id)
                self._kept.append(frame)
            else:
                forwarded += frame
        return forwarded

    def _stale(self, frame: bytes, request_id: int) -> bytes:
        """Return the frame once or twice, or an earlier one, with its own request id or this."""
        before = bytearray(random.choice(self._kept)) if self._kept else frame  # noqa: S311
        match random.randrange(4):  # noqa: S311 - not repeatable anyway: threads
            case 0:
                return bytes(before)
            case 1:
                number = request_id.to_bytes(4, "little")
                return bytes(before[:4]) + number + bytes(before[8:])
            case 2:
                return frame + frame
        return frame


def _randomized(data: bytes) -> bytes:
    """Replace all bytes by random ones, or all after the first `_HEADS_BYTES`."""
    kept = random.choice((0, *3 * (_HEADS_BYTES,)))  # noqa: S311 - not repeatable anyway: threads
    return data[:kept] + os.urandom(len(data[kept:]))
