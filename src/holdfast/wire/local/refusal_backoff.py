"""Backoff after a node's refusals: a refusal holds until someone changes a configuration."""

from __future__ import annotations

import random
import time
from pathlib import Path

REFUSED_S = 60.0
"""Longest delay before the next attempt, in seconds, without its jitter."""

_JITTER = 0.25
"""A delay is longer by a random share of up to this, so that clients that were refused together do
not ask together."""


class RefusalBackoff:
    """When a client that was refused may ask again: after `first_s`, and twice as long each time.

    A node that was started again may have another configuration: it is asked at once. Not
    thread-safe. Call `connecting` before each attempt.
    """

    def __init__(self, address: str, first_s: float) -> None:
        self._socket = Path(address.removeprefix("unix://"))
        self._first_s = first_s
        self._next_s = first_s
        self._until_s = 0.0
        self._node: tuple[int, ...] = ()

    def connecting(self) -> None:
        """Remember which start of the node is asked now."""
        self._node = self._start()

    def refused(self) -> None:
        """Note a refusal: the next attempt waits."""
        jitter = _JITTER * random.random()  # noqa: S311  # no secret
        self._until_s = time.monotonic() + (1 + jitter) * self._next_s
        self._next_s = min(2 * self._next_s, REFUSED_S)

    def accepted(self) -> None:
        """Note a session: the next refusal is a first one."""
        self._next_s, self._until_s = self._first_s, 0.0

    def due(self) -> bool:
        """Return whether the client may ask now."""
        if self._start() != self._node:
            self.accepted()
        return time.monotonic() >= self._until_s

    def _start(self) -> tuple[int, ...]:
        """Return what differs for each start of a node at the address; empty without a socket."""
        try:
            stat = self._socket.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_ctime_ns
