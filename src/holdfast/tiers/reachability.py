"""A circuit breaker for one server, with one log line per outage and recovery.

After two failures in a row it blocks calls to the server for a pause that doubles each time.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable

import msgspec

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Outcome
from holdfast.tiers.breaker import BreakerOptions, BreakerPhase, CallEnding, CircuitBreaker
from holdfast.wire.remote.stream import Deadline

LIMITS = BreakerOptions(failures=2, stall_s=10.0, pause_s=0.1, pause_max_s=5.0, probes=1)

REFUSAL_S = 60.0
"""Time after an error reply for which it is shown, and equal ones are not logged, in seconds."""

_LOGGED_CHARS_MAX = 300
"""Longest part of an error text in a log line, in characters."""

_log = logging.getLogger(__name__)


class LocalTimeoutError(TimeoutError):
    """The time ran out on this side, which is no failure of the server."""


class ServerBackoff:
    """Tracks the health of one server by the outcomes of its calls. Thread-safe."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._call_ended = threading.Condition()
        rng = random.Random()  # noqa: S311  # for jitter of pauses, not for secrets
        self._breaker = CircuitBreaker(clock, LIMITS, rng)
        self._trouble = ""
        self._refusal = ""
        self._refused_s = -math.inf

    def call(self, work: Callable[[], str], deadline: Deadline) -> Outcome:
        """Call `work` if the breaker permits it; OK if it returns, LATE past the deadline, or GONE.

        A text that `work` returns is an error reply, and a failure of the server. A call after its
        deadline does not reach the server and does not count as its failure. While another call
        probes the server, a call waits for the result, so that the parallel parts of a batch
        succeed or fail together.
        """
        if deadline.over:
            return Outcome.LATE
        with self._call_ended:
            while (ticket := self._breaker.begin()) is None:
                if self._breaker.phase() is not BreakerPhase.HALF_OPEN:
                    return Outcome.GONE
                if not self._call_ended.wait(deadline.at - time.monotonic()):
                    return Outcome.LATE
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
            with self._call_ended:
                self._breaker.end(ticket, ending)
                self._call_ended.notify_all()
                before = self._trouble
                if ending is not CallEnding.CANCELLED:
                    self._trouble = trouble
        if trouble and not before:
            _log.warning("%s is gone: %s", self._name, trouble[:_LOGGED_CHARS_MAX])
        elif before and ending is CallEnding.OK:
            _log.info("%s answers again", self._name)
        return outcome

    def record_refusal(self, words: str) -> None:
        """Record an error reply; equal replies within `REFUSAL_S` of each other are logged once."""
        with self._call_ended:
            is_new = words != self._recent_refusal()
            self._refusal, self._refused_s = words, self._clock.now()
        if is_new:
            _log.warning("%s answers: %s", self._name, words[:_LOGGED_CHARS_MAX])

    def allows(self) -> bool:
        """Return whether a call would reach the server now: not while another call probes it."""
        with self._call_ended:
            return self._breaker.allows()

    def health(self) -> dict[str, str]:
        """Return the breaker's `phase`, and as `state` the present error, or "active".

        An error reply counts as present for `REFUSAL_S`.
        """
        with self._call_ended:
            state = self._trouble or self._recent_refusal() or "active"
            return {"state": state, "phase": str(self._breaker.phase())}

    def _recent_refusal(self) -> str:
        """Return the last error reply; empty after `REFUSAL_S`. The caller holds the lock."""
        return self._refusal if self._clock.now() < self._refused_s + REFUSAL_S else ""
