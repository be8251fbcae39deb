"""Hedged reads of hot segments: if the first copy is late, the second is asked; the first wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import NamedTuple, TypeAlias

from holdfast.blocks.envelope import record_length
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.tiers.base import TierGet
from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.segment_batch import SegmentBatch
from holdfast.wire.remote.buffer_pool import consecutive, copy_parts

THREADS = 8
HEDGED_BYTES_MAX = 64 * MIB
"""Largest read that is hedged, in bytes: each of its two requests needs memory of its own."""

HEDGE_PERCENT = 5
HEDGES_SAVED_MAX = 10
"""Most hedges that accumulate while none is sent; bounds the burst when one target stalls."""

Receive: TypeAlias = Callable[[Member, SegmentBatch, Sequence[TierGet], list[Outcome]], list[int]]
"""Receives the leading run of a part from a member; returns the indices left."""


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

    def is_ready(self) -> bool:
        """Return whether `take` would allow a hedge now."""
        with self._lock:
            return self._saved_percent >= 100  # noqa: PLR2004  # per cent

    def take(self) -> bool:
        """Return whether one more hedge may be sent, and count it if so."""
        with self._lock:
            if self._saved_percent < 100:  # noqa: PLR2004  # per cent
                return False
            self._saved_percent -= 100
            self.hedges += 1
            return True


class HedgedResult(NamedTuple):
    """Result of a hedged read: the indices left, and the members that need not be asked again.

    `missed`: whether one of these members answered that it lacks a record.
    """

    left: list[int]
    asked: set[Member]
    missed: bool


class HedgedReads:
    """Runs hedged reads concurrently; owns the threads."""

    def __init__(self, health: PoolHealth, name: str) -> None:
        self.hedging = HedgeBudget()
        self._health = health
        self._threads = ThreadPoolExecutor(THREADS, name)

    def close(self) -> None:
        """Wait for hedged reads in progress."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        members: Sequence[Member],
        part: SegmentBatch,
        batch: Sequence[TierGet],
        outcomes: list[Outcome],
        receive: Receive,
    ) -> HedgedResult:
        """Read a batch from the first member and, if that is late, from the second too.

        Each reads into memory of its own, so that the slower one never writes to the caller's.
        """
        left, asked, missed = part.indices, set[Member](), False
        self.hedging.request()
        first = self._threads.submit(_scratch, members[0], part, batch, receive)
        late_s = self._health.hedge_after_s()
        requests = {first: members[0]}
        if late_s is not None and not wait([first], late_s).done and self.hedging.take():
            second = self._threads.submit(_scratch, members[1], part, batch, receive)
            requests[second] = members[1]
        for done in as_completed(requests):
            received, found = done.result()
            asked.add(requests[done])
            spaces = [batch[index].into for index in left[: len(received)]]
            lengths = [record_length(record) for record in received]
            copy_parts(
                [record[:nbytes] for record, nbytes in zip(received, lengths, strict=True)],
                [space[:nbytes] for space, nbytes in zip(spaces, lengths, strict=True)],
            )
            for index, outcome in zip(left, found, strict=True):
                outcomes[index] = outcome
            missed |= Outcome.MISS in found
            if received:
                return HedgedResult(left[len(received) :], asked, missed)
        return HedgedResult(left, asked, missed)


def _scratch(
    member: Member, part: SegmentBatch, batch: Sequence[TierGet], receive: Receive
) -> tuple[list[memoryview], list[Outcome]]:
    """Read a part into memory of its own; return the records received, and all outcomes."""
    left = part.indices
    sizes = [len(batch[index].into) for index in left]
    parts = consecutive(aligned_buffer(sum(sizes)), sizes)
    own = [batch[index]._replace(into=part) for index, part in zip(left, parts, strict=True)]
    outcomes = [Outcome.LATE] * len(own)
    whole = part._replace(indices=list(range(len(own))))
    missing = receive(member, whole, own, outcomes)
    return [get.into for get in own[: len(own) - len(missing)]], outcomes
