"""A circuit breaker for one server, with one log line per outage and recovery.

After two failures in a row it blocks calls to the server for a pause that doubles each time.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

import msgspec

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Outcome
from holdfast.tiers.breaker import BreakerOptions, BreakerPhase, CallEnding, CircuitBreaker
from holdfast.wire.remote.stream import Deadline

LIMITS = BreakerOptions(failures=2, stall_s=10.0, pause_s=0.1, pause_max_s=5.0, probes=1)

_LOGGED_CHARS_MAX = 300
"""Longest part of an error text in a log line, in characters."""

_log = logging.getLogger(__name__)


class LocalTimeoutError(TimeoutError):
    """The time ran out on this side, which is no failure of the server."""


class ServerBackoff:
    """Tracks the health of one server by the outcomes of its calls. Thread-safe."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._lock = threading.Lock()
        rng = random.Random()  # noqa: S311  # for jitter of pauses, not for secrets
        self._breaker = CircuitBreaker(clock, LIMITS, rng)
        self._trouble = ""
        self._refusal = ""

    def call(self, work: Callable[[], str], deadline: Deadline) -> Outcome:
        """Call `work` if the breaker permits it; OK if it returns, LATE past the deadline, or GONE.

        A text that `work` returns is an error reply, and a failure of the server. A call after its
        deadline does not reach the server and does not count as its failure.
        """
        if deadline.over:
            return Outcome.LATE
        with self._lock:
            ticket = self._breaker.begin()
        if ticket is None:
            return Outcome.GONE
        ending, outcome, trouble = CallEnding.CANCELLED, Outcome.LATE, ""
        try:
            trouble = work()
            ending, outcome = CallEnding.ERROR if trouble else CallEnding.OK, Outcome.OK
        except LocalTimeoutError:
            pass
        except TimeoutError as error:
            ending, trouble = CallEnding.ERROR, f"late: {error}"
        except (OSError, EOFError, HoldfastError, msgspec.MsgspecError) as error:
            ending, outcome = CallEnding.ERROR, Outcome.GONE
            trouble = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._breaker.end(ticket, ending)
                before = self._trouble
                if ending is not CallEnding.CANCELLED:
                    self._trouble = trouble
        if trouble and not before:
            _log.warning("%s is gone: %s", self._name, trouble[:_LOGGED_CHARS_MAX])
        elif before and ending is CallEnding.OK:
            _log.info("%s answers again", self._name)
        return outcome

    def record_refusal(self, words: str) -> None:
        """Record an error reply of the server; repeated equal texts are logged once."""
        if words != self._refusal:
            self._refusal = words
            _log.warning("%s answers: %s", self._name, words[:_LOGGED_CHARS_MAX])

    def allows(self) -> bool:
        """Return whether a call would be permitted now."""
        with self._lock:
            return self._breaker.phase() is not BreakerPhase.OPEN

    def health(self) -> dict[str, str]:
        """Return the breaker's `phase`, and as `state` the last error, or "active"."""
        with self._lock:
            state = self._trouble or self._refusal or "active"
            return {"state": state, "phase": str(self._breaker.phase())}
