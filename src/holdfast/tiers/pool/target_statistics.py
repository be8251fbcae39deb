"""Statistics of one target: answer times by kind of call, failures, and its ejection."""

from __future__ import annotations

import enum
import math
from collections import deque

from holdfast.tiers.breaker import CallEnding, CircuitBreaker

SAMPLES_MAX = 128
SAMPLES_MIN = 20
_FRACTION = 0.95
_LATENCY_GAIN = 1 / 8
_FAILURE_GAIN = 1 / 32


class CallKind(enum.Enum):
    """Kind of a request. Equal kinds are compared: a read waits for flash, a question does not.

    The duration of a write depends on its size, so only failures of writes count.
    """

    QUESTION = enum.auto()
    READ = enum.auto()
    WRITE = enum.auto()


class AnswerTimes:
    """Times to the first byte of one target's answers of one kind."""

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.fresh = 0

    def learn(self, ending: CallEnding, seconds: float) -> None:
        """Record an answer's time to its first byte, or how long its caller waited for it."""
        if ending is CallEnding.EMPTY and seconds <= (self.latency_s or math.inf):
            return
        # The duration of a failed call, or of a read that found nothing, is only a lower bound: it
        # may raise the latency, never lower it.
        if ending is CallEnding.OK or self.latency_s is None or seconds > self.latency_s:
            before_s = seconds if self.latency_s is None else self.latency_s
            self.latency_s = before_s + _LATENCY_GAIN * (seconds - before_s)
        self.fresh += 1


class HedgeDelays:
    """Recent answer times of one target, and their 95th percentile.

    `late_s`: the 95th percentile in seconds; None until there are enough samples.

    Record a cancelled request with the time it had taken so far. Without the slow requests the
    percentile would shrink until every request counted as late.
    """

    def __init__(self) -> None:
        self._last_s: deque[float] = deque(maxlen=SAMPLES_MAX)
        self.late_s: float | None = None

    def record(self, seconds: float) -> None:
        """Record one request's time to its first byte."""
        self._last_s.append(seconds)
        if len(self._last_s) >= SAMPLES_MIN:
            self.late_s = sorted(self._last_s)[int(_FRACTION * len(self._last_s))]


class TargetStatistics:
    """Statistics of one target. Not thread-safe: its owner locks. Times of the owner's clock."""

    def __init__(self, breaker: CircuitBreaker, now_s: float) -> None:
        self.breaker = breaker
        self.closed_s = now_s
        self.ended_s = -math.inf
        """When a call to it last ended."""
        self.last_unhealthy_s = -math.inf
        self.in_flight_bytes = 0
        self.ejected_until_s = 0.0
        self.ejection_s = 0.0
        self.ejected_for_s = 0.0
        self.ejections = 0
        self.on_probation = False
        """Back from an ejection; its probes have not shown yet whether it is faster."""
        self.recovered_s = -math.inf
        """When its breaker last closed again."""
        self.generation = 0
        """Answers to requests of an earlier generation are ignored."""
        self.forget()

    def forget(self) -> None:
        """Reset the statistics after an ejection or an outage.

        Requests sent before the reset do not count either.
        """
        self.generation += 1
        self.delays = HedgeDelays()
        self.answers = {CallKind.QUESTION: AnswerTimes(), CallKind.READ: AnswerTimes()}
        self.failure_share = 0.0
        self.fresh = 0

    def learn(
        self, kind: CallKind, ending: CallEnding, first_byte_s: float, seconds: float
    ) -> None:
        """Record a request: when its answer began, and when it ended.

        A request that was cancelled before it was sent says nothing about the target.
        """
        if ending in (CallEnding.CANCELLED, CallEnding.BUSY):
            return
        # A member answers at once that it lacks a block, but reads a block that it has from disk.
        # Counting empty answers would make a member that has the blocks look slow.
        if kind is CallKind.READ and ending is not CallEnding.EMPTY:
            self.delays.record(seconds)
        if kind in self.answers:
            self.answers[kind].learn(ending, first_byte_s)
        self.failure_share += _FAILURE_GAIN * ((ending is CallEnding.ERROR) - self.failure_share)
        self.fresh += 1

    def slowest_s(self) -> float:
        """Return the latency of the slowest kind; 0 while none is known."""
        return max(answers.latency_s or 0.0 for answers in self.answers.values())
