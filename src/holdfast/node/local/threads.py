"""The thread pools of a node: sessions run the store's work here, fairly between domains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from holdfast.fairness.fair_queue import WorkItem
from holdfast.fairness.fair_threads import FairThreads

FETCH_THREADS = 8
SAVE_THREADS = 4

SPARE_THREADS = 4
"""Additional threads per pool for domains that arrive while others hold all regular ones."""

HINT_THREADS = 2
"""Regular threads for hints; there are as many spare ones."""

SYNC_THREADS = 8
"""Regular threads for syncs. Each waits until a context is durable, so prestages must not."""

OPENING_THREADS = 2
"""Regular threads that read a file to open a session; there are as many spare ones."""

OPERATOR = b""
"""The domain of an operator's work, which names none."""

T = TypeVar("T")


class NodeThreads:
    """One pool per kind of work, so that slow fetches or a long `verify` never delay saves.

    All but reports are scheduled fairly between domains, with spare threads for a domain that
    arrives while others flood.
    """

    def __init__(self) -> None:
        self.fetching = FairThreads(FETCH_THREADS, SPARE_THREADS, "holdfast-fetch")
        self.saving = FairThreads(SAVE_THREADS, SPARE_THREADS, "holdfast-save")
        self.lookup = FairThreads(FETCH_THREADS, SPARE_THREADS, "holdfast-cover")
        self.hinting = FairThreads(HINT_THREADS, HINT_THREADS, "holdfast-hint")
        self.syncing = FairThreads(SYNC_THREADS, SPARE_THREADS, "holdfast-sync")
        self.reporting = FairThreads(1, 0, "holdfast-report")
        self.opening = FairThreads(OPENING_THREADS, OPENING_THREADS, "holdfast-hello")

    def close(self) -> None:
        """Wait for running work, but not for files; work that has not begun is cancelled."""
        pools = self.fetching, self.saving, self.lookup, self.hinting, self.syncing, self.reporting
        for threads in pools:
            threads.shutdown(cancel_futures=True)
        self.opening.give_up_running()
        self.opening.shutdown(cancel_futures=True)


async def run_fair(threads: FairThreads, work_item: WorkItem, work: Callable[[], T]) -> T:
    """Run work in a fair pool and return its result."""
    return await asyncio.wrap_future(threads.submit(work_item, work))
