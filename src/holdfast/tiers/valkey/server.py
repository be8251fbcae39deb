"""One Redis or Valkey server: its connection pool, and calls that end by their deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holdfast.address import TCP, HostPort
from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Outcome
from holdfast.tiers.reachability import ServerBackoff
from holdfast.tiers.valkey.resp import Reply, RespConnection, RespLogin, log_in
from holdfast.wire.remote.stream import Deadline

IDLE_CONNECTIONS_MAX = 4
"""Most idle connections kept for later calls."""


class ValkeyServer:
    """A server. Thread-safe; each concurrent call has its own connection."""

    def __init__(self, endpoint: HostPort, login: RespLogin, clock: Clock) -> None:
        self.endpoint = endpoint
        self.backoff = ServerBackoff("server {}:{}".format(*endpoint), clock)
        self._login = login
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False

    def call(self, work: Callable[[RespConnection], None], deadline: Deadline) -> Outcome:
        """Call `work` with a connection; the outcomes are those of `ServerBackoff.call`.

        A connection that was closed while idle is replaced, so `work` may be called again.
        """

        def attempt() -> str:
            try:
                self._work(work, deadline)
            except (OSError, HoldfastError):
                self._drop_idle()
                raise
            return ""

        return Outcome.GONE if self._closed else self.backoff.call(attempt, deadline)

    def ask(self, question: bytes, deadline: Deadline) -> Reply:
        """Return the reply to one command; None without a reply."""
        replies: list[Reply] = []
        self.call(lambda connection: replies.extend(connection.ask([question], deadline)), deadline)
        return replies[-1] if replies else None

    def describe(self) -> dict[str, Any]:
        """Return the server's name, address and health."""
        name = "{}:{}".format(*self.endpoint)
        return {"id": name, "address": f"{TCP}{name}", **self.backoff.health()}

    def close(self) -> None:
        """Close idle connections; a call in progress closes its own; later calls are GONE."""
        self._closed = True
        self._drop_idle()

    def _work(self, work: Callable[[RespConnection], None], deadline: Deadline) -> None:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = log_in(self.endpoint, self._login, deadline)
            was_used = connection.used
            try:
                work(connection)
            except BaseException as error:
                connection.close()
                if was_used and isinstance(error, ConnectionError):
                    continue  # it may have been closed while it was idle
                raise
            with self._lock:
                keep = not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()
            return

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
