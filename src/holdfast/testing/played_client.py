"""A session with a store, played in memory: for tests of what engines do with its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from holdfast.errors import NodeGoneError, ProtocolError
from holdfast.wire.local.messages import Reply, Request, Welcome

T = TypeVar("T")

DOMAIN_KEY = bytes(range(32))


class PlayedArena:
    """An arena: bytes at a fixed address."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.view = self.bytes.data


class PlayedClient:
    """Keeps what was sent; `answer` makes the reply, None for one that has not come yet.

    `waiting` is called in a wait for a reply, with its limit.
    """

    def __init__(self, answer: Callable[[Any], Any] | None = None, arena_bytes: int = 0) -> None:
        self.welcome = Welcome(1, "fake", DOMAIN_KEY, arena_bytes)
        self.arena = PlayedArena(arena_bytes) if arena_bytes else None
        self.answer = answer or (lambda _message: None)
        self.sent: list[Any] = []
        self.forgotten: list[Any] = []
        self.expected: list[int] = []
        self.waits: list[float] = []
        self.waiting: Callable[[float], Any] | None = None
        self.gone = False
        self.runnable = False
        self._pending: dict[int, Any] = {}

    def connected(self) -> bool:
        """Return whether the session stands."""
        return not self.gone

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the messages of one kind that were sent."""
        return [message for message in self.sent if isinstance(message, kind)]

    def send(self, message: Request) -> int:
        """Keep a request; return its id."""
        self._check()
        self.sent.append(message)
        self._pending[len(self.sent)] = message
        return len(self.sent)

    def poll(self, request_id: int) -> Reply | None:
        """Return the answer to a request; raise it if it is an exception."""
        self._check()
        reply: Reply | Exception | None = self.answer(self._pending[request_id])
        if isinstance(reply, Exception):
            raise reply
        if reply is not None:
            del self._pending[request_id]
        return reply

    def node_is_runnable(self) -> bool:
        """Return `runnable`."""
        return self.runnable

    def expect(self, request_id: int, within_s: float) -> Reply | None:
        """Return the answer, after a call of `waiting`."""
        self.expected.append(request_id)
        self.waits.append(within_s)
        if self.waiting is not None:
            self.waiting(within_s)
        return self.poll(request_id)

    def call(self, message: Request, kind: type[T], timeout_s: float) -> T:
        """Send a request and return its answer, of this kind."""
        reply = self.wait(self.send(message), timeout_s)
        if not isinstance(reply, kind):
            raise ProtocolError(f"{reply}, not {kind.__name__}")
        return reply

    def wait(self, request_id: int, timeout_s: float) -> Reply:
        """Return the answer; without one, the session ends."""
        reply = self.poll(request_id)
        if reply is None:
            self.gone = True
            raise NodeGoneError(f"no answer within {timeout_s} s")
        return reply

    def forget(self, request_id: int) -> None:
        """Note that the answer is not wanted."""
        self.forgotten.append(self._pending.pop(request_id, None))

    def _check(self) -> None:
        if self.gone:
            raise NodeGoneError("gone")


class PlayedConnection:
    """A connection that lends one client; `current` None: there is no session."""

    def __init__(self, client: PlayedClient | None) -> None:
        self.address = "played"
        self.current = client
        self.closed = False
        self.refused = False

    def client(self) -> PlayedClient | None:
        """Return the client, while there is one."""
        return None if self.closed else self.current

    def close(self) -> None:
        """End the session."""
        self.closed = True
