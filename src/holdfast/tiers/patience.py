"""Whether a far side is worth asking now: a breaker, and a line in the log when it goes and comes.

After two failures in a row it is left alone for a while, longer each time.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import NamedTuple

from holdfast.clock import Clock
from holdfast.tiers.pool.breaker import Breaker, BreakerOptions, Ending, Phase, Ticket

LIMITS = BreakerOptions(failures=2, stall_s=10.0, pause_s=0.1, pause_max_s=5.0, probes=1)

_WORDS_MAX = 300

_log = logging.getLogger(__name__)


class Health(NamedTuple):
    """What is thought of a far side now; `trouble` is empty where there is none."""

    phase: Phase
    trouble: str


class Patience:
    """Judges one far side by how calls to it end. Any thread may call."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._lock = threading.Lock()
        chance = random.Random()  # noqa: S311  # spreads pauses, keeps no secret
        self._breaker = Breaker(clock, LIMITS, chance)
        self._trouble = ""
        self._refusal = ""

    def begin(self) -> Ticket | None:
        """Let a call through, or not (None); `end` must follow, once."""
        with self._lock:
            return self._breaker.begin()

    def end(self, ticket: Ticket, ending: Ending, trouble: str = "") -> None:
        """Take note of how a call ended; `trouble` says why, if badly."""
        with self._lock:
            self._breaker.end(ticket, ending)
            before = self._trouble
            if ending is not Ending.GIVEN_UP:
                self._trouble = trouble
        if trouble and not before:
            _log.warning("%s is gone: %s", self._name, trouble[:_WORDS_MAX])
        elif before and ending is Ending.WELL:
            _log.info("%s answers again", self._name)

    def refused(self, words: str) -> None:
        """Take note of an error in place of an answer; the same words are logged once."""
        if words != self._refusal:
            self._refusal = words
            _log.warning("%s answers: %s", self._name, words[:_WORDS_MAX])

    def lets_through(self) -> bool:
        """Return whether a call would be let through now."""
        with self._lock:
            return self._breaker.phase() is not Phase.OPEN

    def health(self) -> Health:
        """Return what is thought of it."""
        with self._lock:
            return Health(self._breaker.phase(), self._trouble or self._refusal)
