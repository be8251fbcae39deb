"""One Redis or Valkey server: its connections, and whether it is worth asking now.

A call ends by its deadline and is never an exception. After two failures in a row the server is
left alone for a while, longer each time; one line in the log when that begins, one when it ends.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Outcome
from holdfast.tiers.pool.breaker import Breaker, BreakerOptions, Ending, Ticket
from holdfast.wire.address import TCP, HostPort
from holdfast.wire.resp import Login, RespConnection, dial
from holdfast.wire.stream import Deadline

KEPT = 4
"""Idle connections that are kept for the next calls."""

PATIENCE = BreakerOptions(failures=2, stall_s=10.0, pause_s=0.1, pause_max_s=5.0, probes=1)

_WORDS_MAX = 300

_log = logging.getLogger(__name__)


class Server:
    """Any thread may call, many at once; each call has a connection for itself."""

    def __init__(self, endpoint: HostPort, login: Login, clock: Clock) -> None:
        self.endpoint = endpoint
        self._login = login
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False
        chance = random.Random()  # noqa: S311  # spreads pauses, keeps no secret
        self._breaker = Breaker(clock, PATIENCE, chance)
        self._trouble = ""
        self._refusal = ""

    def call(self, work: Callable[[RespConnection], None], deadline: Deadline) -> Outcome:
        """Let `work` use a connection: OK when it has, LATE past the deadline, else GONE.

        A connection that died while idle is replaced, so `work` may be called twice.
        """
        with self._lock:
            ticket = None if self._closed else self._breaker.begin()
        if ticket is None:
            return Outcome.GONE
        try:
            self._work(work, deadline)
        except TimeoutError as error:
            self._end(ticket, Ending.BADLY, f"late: {error}")
            return Outcome.LATE
        except (OSError, HoldfastError) as error:
            self._end(ticket, Ending.BADLY, str(error) or type(error).__name__)
            return Outcome.GONE
        except BaseException:
            self._end(ticket, Ending.GIVEN_UP)
            raise
        self._end(ticket, Ending.WELL)
        return Outcome.OK

    def refused(self, words: str) -> None:
        """Take note of an error in place of a reply; the same words are logged once."""
        if words != self._refusal:
            self._refusal = words
            _log.warning("server=%s:%d answers: %s", *self.endpoint, words[:_WORDS_MAX])

    def describe(self) -> dict[str, Any]:
        """Return its name, where it is, and what is thought of it."""
        with self._lock:
            phase, trouble = str(self._breaker.phase()), self._trouble
        name = "{}:{}".format(*self.endpoint)
        state = trouble or self._refusal or "active"
        return {"id": name, "address": f"{TCP}{name}", "state": state, "phase": phase}

    def close(self) -> None:
        """Close idle connections; calls under way close theirs, later calls are GONE."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _work(self, work: Callable[[RespConnection], None], deadline: Deadline) -> None:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = dial(self.endpoint, self._login, deadline)
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

    def _end(self, ticket: Ticket, ending: Ending, trouble: str = "") -> None:
        with self._lock:
            self._breaker.end(ticket, ending)
            before, self._trouble = self._trouble, trouble
            if ending is Ending.BADLY:
                stale, self._idle = self._idle, []
            else:
                stale = []
        for connection in stale:
            connection.close()
        if trouble and not before:
            _log.warning("server=%s:%d gone: %s", *self.endpoint, trouble[:_WORDS_MAX])
        elif before and ending is Ending.WELL:
            _log.info("server=%s:%d answers again", *self.endpoint)
