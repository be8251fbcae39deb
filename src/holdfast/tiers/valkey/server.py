"""One Redis or Valkey server: its connections, and calls that end by their deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Outcome
from holdfast.tiers.patience import Patience
from holdfast.tiers.pool.breaker import Ending
from holdfast.wire.address import TCP, HostPort
from holdfast.wire.resp import Login, RespConnection, log_in
from holdfast.wire.stream import Deadline

KEPT = 4
"""Idle connections that are kept for the next calls."""


class Server:
    """Any thread may call, many at once; each call has a connection for itself."""

    def __init__(self, endpoint: HostPort, login: Login, clock: Clock) -> None:
        self.endpoint = endpoint
        self.patience = Patience("server {}:{}".format(*endpoint), clock)
        self._login = login
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False

    def call(self, work: Callable[[RespConnection], None], deadline: Deadline) -> Outcome:
        """Let `work` use a connection: OK when it has, LATE past the deadline, else GONE.

        A connection that died while idle is replaced, so `work` may be called twice. A server is
        not asked, nor blamed, when the time was over before.
        """
        if deadline.over:
            return Outcome.LATE
        ticket = None if self._closed else self.patience.begin()
        if ticket is None:
            return Outcome.GONE
        try:
            self._work(work, deadline)
        except TimeoutError as error:
            self._drop_idle()
            self.patience.end(ticket, Ending.BADLY, f"late: {error}")
            return Outcome.LATE
        except (OSError, HoldfastError) as error:
            self._drop_idle()
            self.patience.end(ticket, Ending.BADLY, str(error) or type(error).__name__)
            return Outcome.GONE
        except BaseException:
            self.patience.end(ticket, Ending.GIVEN_UP)
            raise
        self.patience.end(ticket, Ending.WELL)
        return Outcome.OK

    def describe(self) -> dict[str, Any]:
        """Return its name, where it is, and what is thought of it."""
        name = "{}:{}".format(*self.endpoint)
        phase, trouble = self.patience.health()
        state = trouble or "active"
        return {"id": name, "address": f"{TCP}{name}", "state": state, "phase": str(phase)}

    def close(self) -> None:
        """Close idle connections; calls under way close theirs, later calls are GONE."""
        self._closed = True
        self._drop_idle()

    def _work(self, work: Callable[[RespConnection], None], deadline: Deadline) -> None:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = log_in(self.endpoint, self._login, deadline)
            seasoned = connection.used
            try:
                work(connection)
            except TimeoutError:
                connection.close()
                raise
            except ConnectionError:
                connection.close()
                if not seasoned:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            self._give(connection)
            return

    def _give(self, connection: RespConnection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
