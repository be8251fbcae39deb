"""Hedged reads of hot segments: if the first copy is late, the second is asked; the first wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import TypeAlias

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.tiers.base import TierGet
from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.segment_batch import SegmentBatch

RACERS = 8
RACED_BYTES = 64 * MIB
"""Most that is read in a race, which takes memory of its own for each racer."""

HEDGE_PERCENT = 5
HEDGES_SAVED_MAX = 10
"""Hedges that a quiet time saves up: enough for one stall of one target, no storm."""

Receive: TypeAlias = Callable[[Member, SegmentBatch, Sequence[TierGet], list[Outcome]], list[int]]
"""Receives the leading run of a part from a member; returns which indices are left."""


class HedgeBudget:
    """At most `percent` hedges per 100 requests, at every moment. Thread-safe."""

    def __init__(self, percent: int = HEDGE_PERCENT) -> None:
        self._percent = percent
        self._saved_percent = 0
        self._lock = threading.Lock()
        self.requests = 0
        self.hedges = 0

    def request(self) -> None:
        """Count a request that is sent in any case."""
        with self._lock:
            self.requests += 1
            most = 100 * HEDGES_SAVED_MAX
            self._saved_percent = min(most, self._saved_percent + self._percent)

    def take(self) -> bool:
        """Return whether one more hedge may be sent, and count it if so."""
        with self._lock:
            if self._saved_percent < 100:  # noqa: PLR2004  # per cent
                return False
            self._saved_percent -= 100
            self.hedges += 1
            return True


class HedgedReads:
    """Runs hedged reads concurrently; owns the threads."""

    def __init__(self, health: PoolHealth, name: str) -> None:
        self.hedging = HedgeBudget()
        self._health = health
        self._racers = ThreadPoolExecutor(RACERS, name)

    def close(self) -> None:
        """Wait for hedged reads in progress."""
        self._racers.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        members: Sequence[Member],
        part: SegmentBatch,
        batch: Sequence[TierGet],
        outcomes: list[Outcome],
        receive: Receive,
    ) -> tuple[list[int], set[Member]]:
        """Read a batch from the first member and, if that is late, from the second too.

        Each reads into memory of its own, so that the slower one never writes to the caller's.
        Returns the indices left, and the members that answered and need not be asked again.
        """
        left, asked = part.indices, set[Member]()
        self.hedging.request()
        first = self._racers.submit(_scratch, members[0], part, batch, receive)
        late_s = self._health.hedge_after_s()
        racing = {first: members[0]}
        if late_s is not None and not wait([first], late_s).done and self.hedging.take():
            second = self._racers.submit(_scratch, members[1], part, batch, receive)
            racing[second] = members[1]
        for done in as_completed(racing):
            landed = done.result()
            asked.add(racing[done])
            if landed:
                for index, record in zip(left, landed, strict=False):
                    batch[index].into[:] = record
                    outcomes[index] = Outcome.OK
                return left[len(landed) :], asked
        return left, asked


def _scratch(
    member: Member, part: SegmentBatch, batch: Sequence[TierGet], receive: Receive
) -> list[memoryview]:
    """Read a part into memory of its own; return the records that came."""
    left = part.indices
    size = len(batch[left[0]].into)
    memory = aligned_buffer(size * len(left))
    own = [
        batch[index]._replace(into=memory[at * size : (at + 1) * size])
        for at, index in enumerate(left)
    ]
    outcomes = [Outcome.MISS] * len(own)
    whole = part._replace(indices=list(range(len(own))))
    missing = receive(member, whole, own, outcomes)
    return [get.into for get in own[: len(own) - len(missing)]]
