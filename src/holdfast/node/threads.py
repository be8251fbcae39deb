"""The threads of a node: where sessions let the store work, the domains by turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.policy.turns import Turn
from holdfast.store.fair_threads import FairThreads

FETCH_THREADS = 8
SAVE_THREADS = 4
"""For one domain at a time."""

SPARE_THREADS = 4
"""More, for others."""

OPERATOR = b""
"""Whose turn it is that names no domain."""

T = TypeVar("T")


class Threads:
    """Where sessions let the store work: slow fetches never hold up saves, nor does `verify`.

    Fetches, saves and questions are done for the domains by turns, and some threads are always
    left for a domain that comes while others flood.
    """

    def __init__(self) -> None:
        self.fetching = FairThreads(FETCH_THREADS, SPARE_THREADS, "holdfast-fetch")
        self.saving = FairThreads(SAVE_THREADS, SPARE_THREADS, "holdfast-save")
        self.asking = FairThreads(FETCH_THREADS, SPARE_THREADS, "holdfast-ask")
        self.looking = ThreadPoolExecutor(1, "holdfast-look")

    def close(self) -> None:
        """Wait for what runs; what has not begun is dropped."""
        for threads in (self.fetching, self.saving, self.asking):
            threads.shutdown(cancel_futures=True)
        self.looking.shutdown(wait=True, cancel_futures=True)


async def take_turn(threads: FairThreads, turn: Turn, work: Callable[[], T]) -> T:
    """Wait for work to be done when its turn comes."""
    return await asyncio.wrap_future(threads.submit(turn, work))


async def run(pool: ThreadPoolExecutor, work: Callable[..., T], *values: Any) -> T:  # noqa: ANN401  # passed on as they are
    """Wait for work to be done in a pool of threads."""
    return await asyncio.get_running_loop().run_in_executor(pool, work, *values)
