"""Whose turn it is: work of several flows on one device, in proportion to their weights.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each piece of work gets the virtual
time at which it would begin if its flow had its share of the device to itself, and the earliest
goes first. A flow that floods only waits behind itself. Pure state: no clock, no threads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


def _anybody(flow: Hashable) -> bool:
    del flow
    return True


class FairQueue(Generic[T]):
    """Work waiting for one device. Not thread-safe. `take` costs a look at each flow that waits."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[tuple[float, int, T]]] = {}
        self._finish: dict[Hashable, float] = {}
        self._now = 0.0
        self._numbers = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, flow: Hashable, cost: float, item: T, share: float = 1.0) -> None:
        """Queue work of a flow: `cost` in any unit that is the same for all, such as bytes."""
        start = max(self._now, self._finish.get(flow, 0.0))
        self._finish[flow] = start + cost / share
        self._numbers += 1
        self._waiting.setdefault(flow, deque()).append((start, self._numbers, item))

    def take(self, may: Callable[[Hashable], bool] = _anybody) -> tuple[Hashable, T] | None:
        """Return the flow whose turn it is, and its work; None where none waits that `may` go."""
        flow = min(filter(may, self._waiting), key=self._start, default=None)
        if flow is None:
            return None
        line = self._waiting[flow]
        self._now, _, item = line.popleft()
        if not line:
            del self._waiting[flow]
        if not self._waiting:  # nobody waits, so nobody has to make up for anything
            self._finish.clear()
        return flow, item

    def earliest(self, may: Callable[[Hashable], bool] = _anybody) -> float:
        """Return when, in virtual time, the next work of those that `may` begins; inf if none."""
        return min((self._start(flow)[0] for flow in filter(may, self._waiting)), default=math.inf)

    def _start(self, flow: Hashable) -> tuple[float, int]:
        return self._waiting[flow][0][:2]
