"""Threads that read from lower tiers: a few per tier, shared fairly between domains by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from holdfast.fairness.fair_threads import FairThreads
from holdfast.fairness.work_slots import Priority, WorkItem

T = TypeVar("T")

BATCHES_AT_ONCE = 4
"""Concurrent read batches per tier: some fill the device's queue while one is verified or opened.
A domain that has none may start a fifth."""


class TierReaders:
    """The read threads of the tiers of these `names`, the first below the host being 1.

    `share` returns a domain's weight relative to other domains.
    """

    def __init__(self, names: Sequence[str], share: Callable[[bytes], float]) -> None:
        self._share = share
        self._threads = [FairThreads(BATCHES_AT_ONCE, 1, f"holdfast-from-{name}") for name in names]

    def submit(self, tier: int, item: WorkItem, read: Callable[[], T]) -> Future[T]:
        """Queue a read of a tier; its domain's share replaces the item's.

        Raises RuntimeError after `close`.
        """
        item = item._replace(share=self._share(item.domain))
        return self._threads[tier - 1].submit(item, read)

    def raise_priority(self, tier: int, domain: bytes, reading: Future[T]) -> None:
        """Give a queued prefetch the priority of a demand read."""
        item = WorkItem(domain, priority=Priority.PREFETCH)
        self._threads[tier - 1].raise_priority(item, reading)

    def is_shared(self, tier: int, domain: bytes) -> bool:
        """Return whether other domains read from a tier now."""
        return self._threads[tier - 1].shared(domain)

    def credit(self, tier: int, domain: bytes) -> float:
        """Return the bytes of a tier that a domain may read before others; 0 for the host."""
        if not tier:
            return 0.0
        return self._threads[tier - 1].credit(WorkItem(domain, share=self._share(domain)))

    def close(self) -> None:
        """Stop the threads after their current reads."""
        for threads in self._threads:
            threads.shutdown()
