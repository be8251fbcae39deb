"""Counts of what a store has done since it was opened: prompts, tokens by source, calls, plans.

`holdfast stats`, the metrics of a node and the first lines of `holdfast inspect` show these counts.
They never reset while the store is open.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.errors import Outcome
from holdfast.status import ActivityStatus, HistogramStatus

SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the buckets of durations, in seconds; one more bucket has no bound."""

ERROR_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets of plan errors: |actual / expected - 1| of the first token."""


class PromptCounts(NamedTuple):
    """One prompt that an engine computed or loaded, in tokens.

    `engine`: leading tokens in the engine's own cache. `loaded`: tokens fetched from the store
    instead of being computed, by the tier that held them. The engine computes the rest.
    """

    tokens: int
    engine: int
    loaded: Mapping[str, int]


class Histogram:
    """Counts of observations by bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def status(self) -> HistogramStatus:
        """Return bounds, the count of each bucket (one more than bounds) and the sum."""
        return HistogramStatus(list(self._bounds), list(self._counts), self._sum)


class Activity:
    """Counters of a store. Thread-safe: every method holds a lock of its own for a moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts = Counter[str]()
        self._loaded = Counter[str]()
        self._calls: dict[str, Counter[str]] = {}
        self._blocks = Counter[str]()
        self._seconds: dict[str, Histogram] = {}
        self._plans = Counter[str]()
        self._plan_error = Histogram(ERROR_BOUNDS)
        self._saved_s = 0.0

    def prompt(self, counts: PromptCounts) -> None:
        """Count a prompt, once, after its engine has loaded or computed it."""
        with self._lock:
            self._prompts["prompts"] += 1
            self._prompts["tokens"] += counts.tokens
            self._prompts["engine_tokens"] += counts.engine
            self._loaded.update(counts.loaded)

    def call(self, name: str, outcome: Outcome, seconds: float, blocks: int) -> None:
        """Count one call of the store, its outcome, its duration and the blocks it was about."""
        with self._lock:
            if name not in self._calls:
                self._calls[name], self._seconds[name] = Counter(), Histogram(SECONDS_BOUNDS)
            self._calls[name][outcome.value] += 1
            self._blocks[name] += blocks
            self._seconds[name].observe(seconds)

    def plan_ended(self, expected_s: float, first_token_s: float, recompute_s: float) -> None:
        """Count a plan that was carried out to the first token.

        It saved the difference between `recompute_s`, estimated for the same prompt without a
        fetch, and the measured `first_token_s`. A plan that took longer counts negative. Times of 0
        are not known.
        """
        with self._lock:
            self._plans["followed"] += 1
            if expected_s > 0:
                self._plan_error.observe(abs(first_token_s / expected_s - 1.0))
            if recompute_s > 0:
                self._saved_s += recompute_s - first_token_s

    def plan_not_followed(self, why: str) -> None:
        """Count a plan that was not carried out."""
        with self._lock:
            self._plans[why] += 1

    def status(self) -> ActivityStatus:
        """Return all counts."""
        with self._lock:
            counted, loaded = self._prompts, dict(self._loaded)
            others = counted["engine_tokens"] + sum(loaded.values())
            return ActivityStatus(
                prompts=counted["prompts"],
                tokens=counted["tokens"],
                engine_tokens=counted["engine_tokens"],
                loaded_tokens=loaded,
                computed_tokens=counted["tokens"] - others,
                calls={name: dict(outcomes) for name, outcomes in self._calls.items()},
                blocks=dict(self._blocks),
                seconds={name: each.status() for name, each in self._seconds.items()},
                plans=dict(self._plans),
                plan_error=self._plan_error.status(),
                saved_s=self._saved_s,
            )
