"""A burst of requests on a slow tier: prestages help those for which they arrive in time.

An engine computes prompts in order of arrival, and a tier reads one context after the other; both
are simulated, and the queue of prestages is the store's.
"""

from dataclasses import dataclass, field
from statistics import mean

import pytest

from holdfast.blocks.namespace import Namespace
from holdfast.plan.prestage import PrestageTimes
from holdfast.store.pending_hints import (
    KeptLimit,
    NamedChain,
    PendingHints,
    PendingPrestage,
)

NAMESPACE = Namespace(b"f" * 16, b"d" * 16, 4096, 16)
MOST = 1 << 30
REQUESTS = 16
PREFILL_S = 1.0


def key_of(request: int) -> bytes:
    return bytes([request]) * 16


@dataclass
class Burst:
    """Requests that arrive together; a context is read in `fetch_s`, `per_step` fit in a step."""

    fetch_s: float
    per_step: int
    hints: PendingHints = field(default_factory=PendingHints)
    reading: list[tuple[float, PendingPrestage]] = field(default_factory=list)
    in_memory: set[int] = field(default_factory=set)

    def first_tokens_s(self) -> list[float]:
        """Return when each request has its first token."""
        waiting, found, now_s = list(range(REQUESTS)), [0.0] * REQUESTS, 0.0
        for request in waiting[: self.per_step - 1 : -1]:  # the newest first
            steps = request // self.per_step
            times = PrestageTimes(
                steps * self.per_step * PREFILL_S, self.fetch_s, 1, "engine", PREFILL_S
            )
            chain = NamedChain(NAMESPACE, key_of(request))
            assert self.hints.wait(0.0, PendingPrestage(chain, times))
            self.begin(0.0)
        while waiting:
            step = list[int]()
            computed = 0
            while waiting and (waiting[0] in self.in_memory or computed < self.per_step):
                computed += waiting[0] not in self.in_memory
                self.hints.withdraw(NAMESPACE, [key_of(waiting[0])])
                step.append(waiting.pop(0))
            end_s = now_s + computed * PREFILL_S
            self.read_until(end_s)
            for request in step:
                found[request] = end_s
            now_s = end_s
        return found

    def begin(self, now_s: float) -> None:
        for staging in self.hints.due(now_s, lambda _: KeptLimit(MOST)):
            start_s = max([now_s, *(end_s for end_s, _ in self.reading)])
            self.reading.append((start_s + self.fetch_s, staging))

    def read_until(self, now_s: float) -> None:
        while self.reading and self.reading[0][0] <= now_s:
            end_s, staging = self.reading.pop(0)
            self.in_memory.add(staging.chain.keys[0])
            self.hints.done(staging)
            self.begin(end_s)


@pytest.mark.parametrize("per_step", [1, 2, 4])
@pytest.mark.parametrize("fetch_s", [0.6, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 20.0])
def test_a_burst_on_a_slow_tier_is_never_slower_than_computing_all(fetch_s, per_step) -> None:
    computed_s = [
        min(REQUESTS, (request // per_step + 1) * per_step) * PREFILL_S
        for request in range(REQUESTS)
    ]
    planned_s = Burst(fetch_s, per_step).first_tokens_s()
    assert mean(planned_s) <= mean(computed_s)


@pytest.mark.parametrize(("fetch_s", "share"), [(0.6, 0.7), (1.0, 0.75), (2.0, 0.85), (4.0, 0.95)])
def test_a_burst_gains_what_the_tier_can_read_in_time(fetch_s, share) -> None:
    computed_s = PREFILL_S * (REQUESTS + 1) / 2
    assert mean(Burst(fetch_s, 1).first_tokens_s()) <= share * computed_s


def test_nothing_is_read_any_more_for_requests_that_got_their_turn() -> None:
    burst = Burst(8.0, 1)
    burst.first_tokens_s()
    assert burst.hints.status(0.0).prestaging == 0
