"""The health of a medium for one kind of call, reads or writes, by the outcomes of its calls.

Reads and writes have a breaker each: a full store refuses writes and still serves reads. One
failure opens the breaker for a short pause that doubles, and after it one call probes the medium.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from holdfast.clock import Clock
from holdfast.errors import Outcome
from holdfast.tiers.breaker import BreakerOptions, BreakerPhase, CallEnding, CircuitBreaker
from holdfast.tiers.segments.medium import MediumAnswer

_OPTIONS = BreakerOptions(failures=1, stall_s=60.0, pause_s=0.1, pause_max_s=5.0, probes=1)

_ENDINGS = {Outcome.OK: CallEnding.OK, Outcome.MISS: CallEnding.OK}

_log = logging.getLogger(__name__)


class MediumHealth:
    """Calls a medium if the breaker permits it. Thread-safe; one log line per outage."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._clock = clock
        self._rng = random.Random()  # noqa: S311  # for jitter of pauses, not for secrets
        self._breaker = CircuitBreaker(clock, _OPTIONS, self._rng)
        self._trouble = ""
        self._closing = False

    def close(self) -> None:
        """Log no more failures: calls in progress fail because the medium is closed."""
        self._closing = True

    def call(self, work: Callable[[], MediumAnswer]) -> MediumAnswer:
        """Return the answer of `work`; GONE without calling it if the breaker is open."""
        with self._lock:
            breaker, trouble = self._breaker, self._trouble
            ticket = breaker.begin()
        if ticket is None:
            return MediumAnswer(Outcome.GONE, why=trouble)
        ending, answer = CallEnding.ERROR, MediumAnswer(Outcome.GONE, why="failed")
        try:
            answer = work()
            ending = _ENDINGS.get(answer.outcome, CallEnding.ERROR)
        finally:
            why = answer.why or answer.outcome.value
            with self._lock:
                breaker.end(ticket, ending)
                before = self._trouble
                self._trouble = "" if ending is CallEnding.OK else why
        if self._closing:
            return answer
        if ending is not CallEnding.OK and not before:
            _log.warning("%s fails: %s", self._name, why)
        elif ending is CallEnding.OK and before:
            _log.info("%s works again", self._name)
        return answer

    def note_answer(self) -> None:
        """Close the breaker: the medium has answered a call of the other kind."""
        with self._lock:
            if self._breaker.phase() is not BreakerPhase.CLOSED:
                self._breaker = CircuitBreaker(self._clock, _OPTIONS, self._rng)

    def is_closed(self) -> bool:
        """Return whether the breaker is closed: the last call did not fail."""
        with self._lock:
            return self._breaker.phase() is BreakerPhase.CLOSED

    def allows(self) -> bool:
        """Return whether a call would reach the medium now."""
        with self._lock:
            return self._breaker.allows()

    def describe(self) -> dict[str, str]:
        """Return the breaker's `phase`, and as `state` the present error, or "active"."""
        with self._lock:
            phase = str(self._breaker.phase())
            return {"state": self._trouble or "active", "phase": phase}
