"""What stands between a node and a target in the chaos campaign: TCP that is slow, mute or lies."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import deque
from typing import Literal, TypeAlias

from holdfast.errors import ProtocolError
from holdfast.wire.frame import HEADER_BYTES, encode, read_head
from holdfast.wire.target_messages import TARGET_PROTOCOL, Challenge

Mood: TypeAlias = Literal[
    "well", "late", "slow", "dribble", "mute", "half open", "cut", "garbage", "stale", "other"
]
"""`late`: a tenth of a second each way. `slow`, `dribble`: 64 KiB/s, 1 KiB/s each way. `mute`:
accepts, and lets no byte through. `half open`: the same, and these connections stay dead for good.
`cut`: resets. `garbage`: random bytes in answers. `stale`: answers come twice, or later in place of
others. `other`: speaks another version of the protocol."""

LATE_S = 0.1
BYTES_PER_S = {"slow": 64 << 10, "dribble": 1 << 10}
ANEW: frozenset[Mood] = frozenset({"cut", "stale", "other"})
"""Moods that connections made before can not be in."""

_PIECE_BYTES = 64 << 10
_PIECES_PER_S = 32
_PAUSE_S = 0.02
_LOOK_S = 0.02
_HANDSHAKE_FRAMES = 2
_KEPT = 64
_NONCE_BYTES = 16
_HEADS_BYTES = 4 << 10


class ChaosProxy:
    """Forwards connections to a port of this machine, as its mood is."""

    def __init__(self, port: int) -> None:
        self.mood: Mood = "well"
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._kept: deque[bytes] = deque(maxlen=_KEPT)
        """Answers that were given lately, whole frames."""
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
        if self.mood == "other":
            with contextlib.suppress(OSError):
                near.sendall(encode(0, Challenge(TARGET_PROTOCOL + 1, os.urandom(_NONCE_BYTES))))
            return False
        if self.mood == "cut":
            return False
        try:
            far = socket.create_connection(self._to, 1.0)
        except OSError:
            return False
        far.settimeout(None)
        with self._lock:
            self._open |= {near, far}
        answers = _Answers(self._kept) if self.mood == "stale" else None
        for ends in ((near, far, None), (far, near, answers)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()
        return True

    def _pump(self, source: socket.socket, sink: socket.socket, answers: _Answers | None) -> None:
        """Move bytes one way until either end is gone; then both are, unless they are half open."""
        dead = False
        with contextlib.suppress(OSError, ProtocolError):
            to_node = source.getpeername() == self._to
            while not self._closing:
                piece_bytes = BYTES_PER_S.get(self.mood, _PIECES_PER_S * _PIECE_BYTES)
                waited_s = time.monotonic()
                data = source.recv(piece_bytes // _PIECES_PER_S)
                while self.mood == "mute" and not self._closing:
                    time.sleep(_LOOK_S)
                dead = dead or self.mood == "half open"
                if not data or self.mood == "cut":
                    break
                self._hold_up(len(data), time.monotonic() - waited_s)
                if self.mood == "garbage" and to_node:
                    data = _spoilt(data)
                if answers:
                    data = answers.told(data, stale=self.mood == "stale")
                if not dead:
                    sink.sendall(data)
        with self._lock:
            self._open -= {source} if dead else {source, sink}
        for end in (source,) if dead else (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def _hold_up(self, nbytes: int, waited_s: float) -> None:
        """Take the time that bytes take; the first ones after a pause are those that are late."""
        if self.mood in BYTES_PER_S:
            time.sleep(nbytes / BYTES_PER_S[self.mood])
        elif self.mood == "late" and waited_s > _PAUSE_S:
            time.sleep(LATE_S)


class _Answers:
    """The answers on one connection, whole frames; some are kept to be given again."""

    def __init__(self, kept: deque[bytes]) -> None:
        self._kept = kept
        self._waiting = bytearray()
        self._frames = 0

    def told(self, data: bytes, *, stale: bool) -> bytes:
        """Return what to pass on once these bytes came: whole frames, the right ones or others."""
        self._waiting += data
        said = b""
        while len(self._waiting) >= HEADER_BYTES:
            head = read_head(bytes(self._waiting[:HEADER_BYTES]))
            size = HEADER_BYTES + head.body_bytes + head.payload_bytes
            if len(self._waiting) < size:
                break
            frame = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._frames += 1
            if stale and self._frames > _HANDSHAKE_FRAMES:
                said += self._instead(frame, head.request_id)
                self._kept.append(frame)
            else:
                said += frame
        return said

    def _instead(self, frame: bytes, request_id: int) -> bytes:
        """Return a frame as it is, twice, or one of before: under its own number or under this."""
        before = bytearray(random.choice(self._kept)) if self._kept else frame  # noqa: S311
        match random.randrange(4):  # noqa: S311 - threads take turns anyhow
            case 0:
                return bytes(before)
            case 1:
                number = request_id.to_bytes(4, "little")
                return bytes(before[:4]) + number + bytes(before[8:])
            case 2:
                return frame + frame
        return frame


def _spoilt(data: bytes) -> bytes:
    """Return random bytes instead of all of it, or of all but what a frame begins with."""
    kept = random.choice((0, *3 * (_HEADS_BYTES,)))  # noqa: S311 - threads take turns anyhow
    return data[:kept] + os.urandom(len(data[kept:]))
