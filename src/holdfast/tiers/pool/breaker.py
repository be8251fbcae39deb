"""A circuit breaker: stops asking a target that fails or says nothing, then tries it gently.

    closed ──(failures in a row, or waited in vain)──> open ──(a pause)──> half open
      ^                                                 ^                    │   │
      └──────────(probes went well)─────────────────────┼────────────────────┘   │
                                                        └──────(a probe failed)──┘

Waiting counts as evidence before any deadline has passed: a target that swallows everything would
otherwise be noticed only after several of them. What counts is the time spent waiting since the
last good sign, over all requests, given up ones included; time without requests does not.
"""

from __future__ import annotations

import enum
import random
from typing import NamedTuple

import msgspec

from holdfast.clock import Clock
from holdfast.limits import KIB


class Phase(enum.StrEnum):
    """What a breaker lets through: everything, nothing, or one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Ending(enum.StrEnum):
    """How a request ended: well, or with nothing there, badly or too late, or given up by us.

    A read that finds nothing ends as well as any; but it says nothing of how long reads take.
    """

    WELL = "well"
    EMPTY = "empty"
    BADLY = "badly"
    GIVEN_UP = "given up"


_GOOD = (Ending.WELL, Ending.EMPTY)


class BreakerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When to open, and for how long; times in seconds.

    `failures` in a row open it, and so does waiting for `stall_s` while fewer than
    `progress_bytes` move. Each pause is twice the one before, from `pause_s` to `pause_max_s`,
    and up to `jitter` of itself longer, so that clients do not probe together. `probes` in a row
    must go well to close it.
    """

    failures: int = 3
    stall_s: float = 1.5
    progress_bytes: int = 96 * KIB
    pause_s: float = 1.0
    pause_max_s: float = 30.0
    jitter: float = 0.25
    probes: int = 2


class Ticket(NamedTuple):
    """A request that was let through. Tickets of an earlier era are of no interest any more."""

    era: int


class Breaker:
    """One target's breaker. Not for several threads at once: its owner locks."""

    def __init__(self, clock: Clock, options: BreakerOptions, chance: random.Random) -> None:
        self._clock = clock
        self._options = options
        self._chance = chance
        self._phase = Phase.CLOSED
        self._era = 0
        self._outstanding = 0
        self._failures = 0
        self._proved = 0
        self._waited_s = 0.0
        self._waiting_since_s = 0.0
        self._heard_bytes = 0
        self._pause_s = options.pause_s
        self._pause_until_s = 0.0
        self.opened = 0

    def phase(self) -> Phase:
        """Return the phase as of now."""
        self._turn(self._clock.now())
        return self._phase

    def allows(self) -> bool:
        """Return whether `begin` would let a request through now."""
        phase = self.phase()
        return phase is Phase.CLOSED or (phase is Phase.HALF_OPEN and not self._outstanding)

    def begin(self) -> Ticket | None:
        """Let a request through, or not (None). A ticket must be given to `end` in the end."""
        if not self.allows():
            return None
        if not self._outstanding:
            self._waiting_since_s = self._clock.now()
        self._outstanding += 1
        return Ticket(self._era)

    def heard(self, ticket: Ticket, nbytes: int) -> None:
        """Take note that bytes came, or went; enough of them are a good sign."""
        if ticket.era == self._era:
            self._heard_bytes += nbytes
            if self._heard_bytes >= self._options.progress_bytes:
                self._good_sign()

    def end(self, ticket: Ticket, ending: Ending) -> None:
        """Take note of how a request ended; each ticket once."""
        if ticket.era != self._era:
            return
        now_s = self._clock.now()
        if ending in _GOOD:
            self._good_sign()
            self._failures = 0
        self._waited_s += now_s - self._waiting_since_s
        self._waiting_since_s = now_s
        self._outstanding -= 1
        if ending is Ending.BADLY:
            self._failures += 1
            if self._phase is Phase.HALF_OPEN or self._failures >= self._options.failures:
                self._open(now_s)
        elif ending in _GOOD and self._phase is Phase.HALF_OPEN:
            self._proved += 1
            if self._proved >= self._options.probes:
                self._enter(Phase.CLOSED)
                self._pause_s = self._options.pause_s

    def _turn(self, now_s: float) -> None:
        """Make the one change that time alone may bring."""
        if self._phase is Phase.OPEN:
            if now_s >= self._pause_until_s:
                self._enter(Phase.HALF_OPEN)
            return
        waiting_s = now_s - self._waiting_since_s if self._outstanding else 0.0
        if self._waited_s + waiting_s >= self._options.stall_s:
            self._open(now_s)

    def _good_sign(self) -> None:
        self._waited_s = 0.0
        self._waiting_since_s = self._clock.now()
        self._heard_bytes = 0

    def _open(self, now_s: float) -> None:
        self._enter(Phase.OPEN)
        self.opened += 1
        longer = 1.0 + self._options.jitter * self._chance.random()
        self._pause_until_s = now_s + self._pause_s * longer
        self._pause_s = min(2 * self._pause_s, self._options.pause_max_s)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._era += 1
        self._outstanding = 0
        self._failures = 0
        self._proved = 0
        self._waited_s = 0.0
        self._heard_bytes = 0
