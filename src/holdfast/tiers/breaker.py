"""A circuit breaker: stops requests to a target that fails or stalls, then probes it.

    closed ──(failures in a row, or a stall)──> open ──(a pause)──> half open
      ^                                          ^                    │   │
      └──────────(probes succeeded)──────────────┼────────────────────┘   │
                                                 └──────(a probe failed)──┘

A stall is the time since the last progress in which at least one request was outstanding; requests
that are cancelled later count, too. A stall opens the breaker before any deadline passes: without
it, a target that never answers would be detected only after several deadlines.
"""

from __future__ import annotations

import enum
import random
from typing import NewType

import msgspec

from holdfast.clock import Clock
from holdfast.limits import KIB


class BreakerPhase(enum.StrEnum):
    """Phase of a breaker: it permits every request, none, or one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class CallEnding(enum.StrEnum):
    """How a request ended: OK, EMPTY (an answer without records), ERROR, CANCELLED, or BUSY.

    An EMPTY read is a success, but its duration does not count toward the latency of reads. BUSY:
    the target is there and has no connection free; neither a success nor a failure, nor a stall.
    """

    OK = "ok"
    EMPTY = "empty"
    ERROR = "error"
    CANCELLED = "cancelled"
    BUSY = "busy"


_SUCCESSES = (CallEnding.OK, CallEnding.EMPTY)


class BreakerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a breaker opens, and for how long; times in seconds.

    It opens after `failures` in a row, or after `stall_s` of waiting in which fewer than
    `progress_bytes` arrive. Pauses double from `pause_s` to `pause_max_s`; each is longer by a
    random fraction of up to `jitter`, so that clients do not probe at the same time. It closes
    after `probes` successes in a row.
    """

    failures: int = 3
    stall_s: float = 1.5
    progress_bytes: int = 96 * KIB
    pause_s: float = 1.0
    pause_max_s: float = 30.0
    jitter: float = 0.25
    probes: int = 2


CallTicket = NewType("CallTicket", int)
"""A permitted request: the number of the phase. The breaker ignores tickets of earlier phases."""


class CircuitBreaker:
    """The breaker of one target. Not thread-safe: the owner holds a lock around every call."""

    def __init__(self, clock: Clock, options: BreakerOptions, rng: random.Random) -> None:
        self._clock = clock
        self._options = options
        self._rng = rng
        self._phase = BreakerPhase.CLOSED
        self._phase_number = 0
        self._outstanding = 0
        self._failures = 0
        self._probes_passed = 0
        self._waited_s = 0.0
        self._waiting_since_s = 0.0
        self._progress_bytes = 0
        self._pause_s = options.pause_s
        self._pause_until_s = 0.0
        self.opened = 0
        """Number of times it has opened."""

    def phase(self) -> BreakerPhase:
        """Return the phase now; first make a change of phase that is due by time alone."""
        now_s = self._clock.now()
        if self._phase is BreakerPhase.OPEN:
            if now_s >= self._pause_until_s:
                self._enter(BreakerPhase.HALF_OPEN)
        else:
            waiting_s = now_s - self._waiting_since_s if self._outstanding else 0.0
            if self._waited_s + waiting_s >= self._options.stall_s:
                self._open(now_s)
        return self._phase

    def allows(self) -> bool:
        """Return whether `begin` would permit a request now."""
        phase = self.phase()
        return phase is BreakerPhase.CLOSED or (
            phase is BreakerPhase.HALF_OPEN and not self._outstanding
        )

    def begin(self) -> CallTicket | None:
        """Permit a request, or return None. Pass the ticket to `end` once."""
        if not self.allows():
            return None
        if not self._outstanding:
            self._waiting_since_s = self._clock.now()
        self._outstanding += 1
        return CallTicket(self._phase_number)

    def on_progress(self, ticket: CallTicket, nbytes: int) -> None:
        """Count bytes that arrived; every `progress_bytes` of them end a stall."""
        if ticket == self._phase_number:
            self._progress_bytes += nbytes
            if self._progress_bytes >= self._options.progress_bytes:
                self._end_stall()

    def end(self, ticket: CallTicket, ending: CallEnding) -> None:
        """Record how a request ended; once per ticket."""
        if ticket != self._phase_number:
            return
        now_s = self._clock.now()
        if ending in _SUCCESSES:
            self._failures = 0
        if ending in _SUCCESSES or ending is CallEnding.BUSY:
            self._end_stall()
        self._waited_s += now_s - self._waiting_since_s
        self._waiting_since_s = now_s
        self._outstanding -= 1
        if ending is CallEnding.ERROR:
            self._failures += 1
            if self._phase is BreakerPhase.HALF_OPEN or self._failures >= self._options.failures:
                self._open(now_s)
        elif ending in _SUCCESSES and self._phase is BreakerPhase.HALF_OPEN:
            self._probes_passed += 1
            if self._probes_passed >= self._options.probes:
                self._enter(BreakerPhase.CLOSED)
                self._pause_s = self._options.pause_s

    def trip(self) -> None:
        """Open now, as after a stall."""
        if self._phase is not BreakerPhase.OPEN:
            self._open(self._clock.now())

    def _end_stall(self) -> None:
        self._waited_s = 0.0
        self._waiting_since_s = self._clock.now()
        self._progress_bytes = 0

    def _open(self, now_s: float) -> None:
        self._enter(BreakerPhase.OPEN)
        self.opened += 1
        longer = 1.0 + self._options.jitter * self._rng.random()
        self._pause_until_s = now_s + self._pause_s * longer
        self._pause_s = min(2 * self._pause_s, self._options.pause_max_s)

    def _enter(self, phase: BreakerPhase) -> None:
        self._phase = phase
        self._phase_number += 1
        self._outstanding = 0
        self._failures = 0
        self._probes_passed = 0
        self._waited_s = 0.0
        self._progress_bytes = 0
