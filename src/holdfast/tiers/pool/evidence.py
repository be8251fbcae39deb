"""What is known of one target: how its answers were, by kind, and since when it is left alone."""

from __future__ import annotations

import enum
import math

from holdfast.tiers.pool.breaker import Breaker, Ending
from holdfast.tiers.pool.hedge import Delays

_LATENCY_GAIN = 1 / 8
_FAILURE_GAIN = 1 / 32


class Kind(enum.Enum):
    """What a request is. Only like is compared with like: a read waits for flash, a question not.

    How long a write takes says how much was written, so of writes only failures count.
    """

    QUESTION = enum.auto()
    READ = enum.auto()
    WRITE = enum.auto()


class Answers:
    """How long one target's answers of one kind took to their first byte."""

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.fresh = 0

    def learn(self, ending: Ending, seconds: float) -> None:
        """Take an answer's time to its first byte, or how long we waited for it, into account."""
        if ending is Ending.EMPTY and seconds <= (self.latency_s or math.inf):
            return
        # What failed says how long it took at least: good only to know that it is slow. So does
        # what found nothing, where reads that do find something are quicker.
        if ending is Ending.WELL or self.latency_s is None or seconds > self.latency_s:
            before_s = seconds if self.latency_s is None else self.latency_s
            self.latency_s = before_s + _LATENCY_GAIN * (seconds - before_s)
        self.fresh += 1


class Evidence:
    """One target. Not for several threads at once: its owner locks. Times of the owner's clock."""

    def __init__(self, breaker: Breaker, now_s: float) -> None:
        self.breaker = breaker
        self.closed_s = now_s
        self.unwell_s = -math.inf
        self.in_flight_bytes = 0
        self.ejected_until_s = 0.0
        self.ejection_s = 0.0
        self.ejected_for_s = 0.0
        self.ejections = 0
        self.on_trial = False
        """Back from an ejection, and not known yet to be any better."""
        self.recovered_s = -math.inf
        """When its breaker last closed again."""
        self.era = 0
        """Answers to what was asked in an earlier era are of no interest any more."""
        self.forget()

    def forget(self) -> None:
        """Start judging anew, after an ejection or an outage.

        What it was like before is no evidence, nor what becomes of requests sent by then.
        """
        self.era += 1
        self.delays = Delays()
        self.answers = {Kind.QUESTION: Answers(), Kind.READ: Answers()}
        self.failure_share = 0.0
        self.fresh = 0

    def learn(self, kind: Kind, ending: Ending, first_byte_s: float, seconds: float) -> None:
        """Take a request into account: when its answer began, and when it was over.

        What was given up was never sent: it was for us to send it, and says nothing of the target.
        """
        if ending is Ending.GIVEN_UP:
            return
        # What is not there is known at once. Compared with that, the only member that has
        # anything would be slow: it brings it from its disk first.
        if kind is Kind.READ and ending is not Ending.EMPTY:
            self.delays.record(seconds)
        if kind in self.answers:
            self.answers[kind].learn(ending, first_byte_s)
        self.failure_share += _FAILURE_GAIN * ((ending is Ending.BADLY) - self.failure_share)
        self.fresh += 1

    def latency_s(self, kind: Kind) -> float | None:
        """Return how long answers of a kind take to their first byte; None: not known."""
        return self.answers[kind].latency_s

    def slowest_s(self) -> float:
        """Return the latency of the kind that takes longest; 0 while none is known."""
        return max(answers.latency_s or 0.0 for answers in self.answers.values())
