"""The order of an engine's loads: short loads pass long ones, and run beside them."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

BESIDE_SHARE = 0.5
"""Largest size of a load that runs beside others, as a share of the smallest of them.

So all that run together are less than twice the largest one, in memory of the node and in time.
"""

T = TypeVar("T")


class _WaitingLoad(NamedTuple, Generic[T]):
    rank: int
    number: int
    size: int
    item: T


class LoadQueue(Generic[T]):
    """Loads that wait, and the sizes of those that run. Pure; not thread-safe.

    Sizes have any common unit. Of two waiting loads, the shorter one starts first, but a load is
    passed by loads of at most its own size in total: its rank is its size plus the size of all that
    started before it arrived.
    """

    def __init__(self) -> None:
        self._waiting: list[_WaitingLoad[T]] = []
        self._running: list[int] = []
        self._started = 0
        self._numbers = 0

    def put(self, size: int, item: T) -> None:
        """Queue a load."""
        self._numbers += 1
        self._waiting.append(_WaitingLoad(self._started + size, self._numbers, size, item))

    def take(self) -> T | None:
        """Return the next load that may run now, counting it as running; None if none may."""
        most = BESIDE_SHARE * min(self._running) if self._running else float("inf")
        startable = [load for load in self._waiting if load.size <= most]
        if not startable:
            return None
        first = min(startable, key=lambda load: (load.rank, load.number))
        self._waiting.remove(first)
        self._running.append(first.size)
        self._started += first.size
        return first.item

    def done(self, size: int) -> None:
        """End a running load."""
        self._running.remove(size)
