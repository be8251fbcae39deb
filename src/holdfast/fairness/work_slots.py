"""Fair scheduling of a bounded number of concurrent work items between domains; pure.

Up to `usual` items run at once, in fair-queue order. `spare` additional slots are reserved for
domains that arrive while other domains hold all usual slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from holdfast.fairness.fair_queue import FairQueue, Priority, WorkItem

SEEN_S = 60.0
"""A domain that had work in this last period counts as active."""

_SEEN_DOMAINS = 2
"""Domains whose last work is remembered: of them one is always another one than a given domain."""

T = TypeVar("T")


class WorkSlots(Generic[T]):
    """Waiting and running work by domain. Not thread-safe; times in monotonic seconds.

    `usual` items run at once, and up to `spare` more of domains with few running items.
    """

    def __init__(self, usual: int, spare: int) -> None:
        self._usual = usual
        self._most = usual + spare
        self._queue: FairQueue[T] = FairQueue()
        self._running: Counter[bytes] = Counter()
        self._seen: dict[bytes, float] = {}
        """When work of the domains that had work last arrived, the latest at the end.

        Few, because a peer may name a new domain with each request; `shared` needs no more.
        """

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._queue)

    @property
    def empty(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._running and not self._queue

    def put(self, work_item: WorkItem, item: T, now: float) -> None:
        """Queue work."""
        self._note_seen(work_item.domain, now)
        self._queue.advance(now)
        self._queue.put(work_item, item)

    def begin(self, work_item: WorkItem, now: float) -> bool:
        """Start work if it need not wait, counting it as running; return whether it started."""
        if self._queue or self._running.total() >= self._usual:
            return False
        self.charge(work_item, now)
        self._running[work_item.domain] += 1
        return True

    def charge(self, work_item: WorkItem, now: float) -> None:
        """Account for work that bypasses the queue: no item waited, or it is too small to."""
        self._note_seen(work_item.domain, now)
        self._queue.advance(now)
        self._queue.charge(work_item)

    def take(self, now: float) -> tuple[WorkItem, T] | None:
        """Return the next item that may start, counting it as running; None if none may.

        A spare slot goes only to the first item in fair-queue order, and only if its domain runs
        fewer items than there are free slots.
        """
        queue = self._queue
        queue.advance(now)
        if self._running.total() < self._usual:
            taken = queue.take()
        elif queue and queue.earliest(self._may_use_spare) <= queue.earliest():
            taken = queue.take(self._may_use_spare)
        else:
            taken = None
        if taken is not None:
            self._running[taken[0].domain] += 1
        return taken

    def withdraw(self, work_item: WorkItem, item: T) -> None:
        """Remove waiting work that was cancelled."""
        self._queue.withdraw(work_item.flow, lambda waiting: waiting is item)

    def raise_priority(self, domain: bytes, wanted: Callable[[T], bool], now: float) -> None:
        """Move a domain's waiting prefetches that are `wanted` to demand priority."""
        for work_item, item in self._queue.withdraw((domain, Priority.PREFETCH), wanted):
            self.put(work_item._replace(priority=Priority.DEMAND), item, now)

    def done(self, work_item: WorkItem, undone: float = 0.0) -> None:
        """End running work, and refund the part `undone` of its cost."""
        if undone:
            self._queue.refund(work_item, undone)
        self._running[work_item.domain] -= 1
        if not self._running[work_item.domain]:
            del self._running[work_item.domain]

    def credit(self, work_item: WorkItem, now: float) -> float:
        """Return the cost of work that a domain could have served ahead of others now."""
        self._queue.advance(now)
        return self._queue.credit(work_item)

    def shared(self, domain: bytes, now: float) -> bool:
        """Return whether other domains had work here in the last `SEEN_S` seconds."""
        return any(now - at < SEEN_S for other, at in self._seen.items() if other != domain)

    def clear(self) -> list[T]:
        """Remove and return all waiting work."""
        waiting = []
        while (taken := self._queue.take()) is not None:
            waiting.append(taken[1])
        return waiting

    def _note_seen(self, domain: bytes, now: float) -> None:
        self._seen.pop(domain, None)
        self._seen[domain] = now
        if len(self._seen) > _SEEN_DOMAINS:
            del self._seen[next(iter(self._seen))]

    def _may_use_spare(self, flow: Hashable) -> bool:
        domain: bytes = flow[0]  # type: ignore[index]
        return self._running[domain] < self._most - self._running.total()
