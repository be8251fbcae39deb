"""Weighted fair queue of the flows that share one device, fair over the last few seconds.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each flow has a position in virtual
time, which advances by cost divided by weight; the flow with the lowest position is served first.
Alone, this is fair only between flows that wait at the same moment. So a flow that returns after a
pause starts at a lower position, as in borrowed virtual time (Duda and Cheriton, SOSP 1999): lower
by at most what a flow of its weight was served in the last window. This is its credit, and the flow
is served first until the credit is spent. A flow that keeps the device busy has no credit; if all
flows do, they are served by weight.

Credit is bounded by one window. While a flow spends credit, the share `MIN_SHARE` of the device
rotates among the other flows (a deficit counter as in Shreedhar and Varghese, SIGCOMM 1995), so
that no flow starves. The past ages faster while the queue is empty, because work on an idle device
delays no other flow. Pure state: no clock, no threads.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

WINDOW_S = 4.0
"""Length of the service history: longer than most fetches, short enough to forget load peaks."""

MIN_SHARE = 1 / 20
"""Share of the device for the other flows while one flow is served on credit."""

IDLE_AGES = 8.0
"""Factor by which the history ages faster while the queue is empty."""

_HISTORY_SLOTS = 64
"""Resolution of the service history: slots per window."""

_MAX_IDLE_POSITIONS = 64
"""Number of idle flows at which old positions are dropped."""

T = TypeVar("T")


class Priority(float, enum.Enum):
    """Whether a request waits for the read (demand), may need it later, or a tier moves a block.

    The value is the weight relative to other reads of the same domain. Prefetches get no credit. A
    float enum, because the hash of a float is fast.
    """

    DEMAND = 1.0
    PREFETCH = 1 / 16
    MOVE = 1 / 256


class WorkItem(NamedTuple):
    """The domain, cost (in a unit common to all items), weight and priority of one work item.

    `request`: cost of the whole request that the item is part of. Of two requests of a flow, the
    one with less left is served first; one request is passed by at most its own cost. Items of
    request 0 are served in order of arrival.
    """

    domain: bytes
    cost: float = 1.0
    share: float = 1.0
    priority: Priority = Priority.DEMAND
    request: float = 0.0

    @property
    def flow(self) -> Hashable:
        """The queue that the item waits in: one per domain and priority."""
        return self.domain, self.priority

    @property
    def weight(self) -> float:
        """Weight of the flow."""
        return self.share * self.priority


class _Work(NamedTuple, Generic[T]):
    number: int
    work_item: WorkItem
    item: T


class _WaitingFlow(Generic[T]):
    """The waiting work of one flow, the request with the least left first.

    A request that arrives when the flow has been served `served` gets the rank `served` plus its
    cost, and keeps it: what is served meanwhile counts against requests that arrive later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Work[T]]] = []
        self._served = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> _Work[T]:
        """The work that is served next."""
        return self._heap[0][2]

    def put(self, work: _Work[T]) -> None:
        heappush(self._heap, (self._served + work.work_item.request, work.number, work))

    def pop(self) -> _Work[T]:
        work = heappop(self._heap)[2]
        self._served += work.work_item.cost
        return work

    def withdraw(self, cancelled: Callable[[T], bool]) -> list[_Work[T]]:
        """Remove and return the work for which `cancelled` is true, in order of arrival."""
        found = [entry for entry in self._heap if cancelled(entry[2].item)]
        self._heap = [entry for entry in self._heap if not cancelled(entry[2].item)]
        heapify(self._heap)
        return [work for _, _, work in sorted(found, key=lambda entry: entry[1])]


def _any_flow(flow: Hashable) -> bool:
    del flow
    return True


class FairQueue(Generic[T]):
    """Work waiting for one device. Not thread-safe. `take` is linear in the waiting flows.

    Each work item stands for an item of the caller, which `take` returns with it.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _WaitingFlow[T]] = {}
        self._position: dict[Hashable, float] = {}
        self._last_served: dict[Hashable, int] = {}
        self._positions_max = _MAX_IDLE_POSITIONS
        """Number of positions at which old ones are dropped.

        Twice as many as were left the last time: so each item pays for a constant number of them,
        however many flows were served in the window.
        """
        self._now = 0.0
        self._highest = 0.0
        self._history = _ServiceHistory()
        self._advanced_at: float | None = None
        self._numbers = 0
        self._deficit = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def advance(self, now: float) -> None:
        """Set the current time, in monotonic seconds. Call it before `put` and `take`."""
        passed_s = 0.0 if self._advanced_at is None else max(0.0, now - self._advanced_at)
        self._advanced_at = now
        self._history.age(passed_s if self._waiting else IDLE_AGES * passed_s)

    def put(self, work_item: WorkItem, item: T) -> None:
        """Add work to its flow's queue."""
        flow = work_item.flow
        if flow not in self._waiting:
            self._position[flow] = self._start(work_item)
            self._waiting[flow] = _WaitingFlow()
        self._numbers += 1
        self._waiting[flow].put(_Work(self._numbers, work_item, item))

    def take(self, eligible: Callable[[Hashable], bool] = _any_flow) -> tuple[WorkItem, T] | None:
        """Remove and return the next work; None if no eligible flow waits."""
        flows = list(filter(eligible, self._waiting))
        if not flows:
            return None
        self._now = max(self._now, min(map(self._position.__getitem__, self._waiting)))
        flow = self._next(flows)
        queued = self._waiting[flow]
        _, work_item, item = queued.pop()
        if not queued:
            del self._waiting[flow]
        self._numbers += 1
        self._last_served[flow] = self._numbers
        self._serve(work_item)
        return work_item, item

    def charge(self, work_item: WorkItem) -> None:
        """Account for work that bypasses the queue: `put` and `take` in one."""
        if work_item.flow not in self._waiting:
            self._position[work_item.flow] = self._start(work_item)
        self._serve(work_item)

    def _serve(self, work_item: WorkItem) -> None:
        flow, cost = work_item.flow, work_item.cost
        self._position[flow] = at = self._position[flow] + cost / work_item.weight
        self._highest = max(self._highest, at)
        # With an empty queue, no flow has fallen behind another.
        if not self._waiting and self._highest > self._now:
            self._now = self._highest
        self._history.note(self._now, cost)
        if len(self._position) > self._positions_max:
            # Drop positions of idle flows that are too old to affect their next start.
            then, _ = self._history.window()
            self._position = {
                flow: at
                for flow, at in self._position.items()
                if flow in self._waiting or at > then
            }
            self._last_served = {
                flow: n for flow, n in self._last_served.items() if flow in self._position
            }
            self._positions_max = 2 * len(self._position) + _MAX_IDLE_POSITIONS

    def head(self, flow: Hashable) -> WorkItem:
        """Return the next work of a waiting flow, without removing it."""
        return self._waiting[flow].first.work_item

    def withdraw(self, flow: Hashable, cancelled: Callable[[T], bool]) -> list[tuple[WorkItem, T]]:
        """Remove and return the waiting work of a flow for which `cancelled` is true."""
        if flow not in self._waiting:
            return []
        withdrawn = self._waiting[flow].withdraw(cancelled)
        if not len(self._waiting[flow]):
            del self._waiting[flow]
        return [(work.work_item, work.item) for work in withdrawn]

    def refund(self, work_item: WorkItem, cost: float) -> None:
        """Return the part `cost` of taken work that was not done to the flow."""
        if work_item.flow in self._position:
            self._position[work_item.flow] -= cost / work_item.weight

    def earliest(self, eligible: Callable[[Hashable], bool] = _any_flow) -> float:
        """Return the lowest position, in virtual time, of eligible waiting flows; inf if none."""
        positions = (self._position[flow] for flow in filter(eligible, self._waiting))
        return min(positions, default=math.inf)

    def credit(self, work_item: WorkItem) -> float:
        """Return the cost of work that a flow could have served ahead of others now."""
        waits = work_item.flow in self._waiting
        position = self._position[work_item.flow] if waits else self._start(work_item)
        return max(0.0, (self._now - position) * work_item.weight)

    def _start(self, work_item: WorkItem) -> float:
        """Return the position of an arriving flow: its old one, or `now` less its credit.

        The credit is what a flow of its weight was served in the window, at most all work served.
        """
        behind = self._now
        if work_item.priority is Priority.DEMAND:
            then, served = self._history.window()
            behind -= min(self._now - then, served / work_item.weight)
        return max(self._position.get(work_item.flow, behind), behind)

    def _next(self, flows: list[Hashable]) -> Hashable:
        """Return the flow with the lowest position, or another one for its part of `MIN_SHARE`.

        If the flow with the lowest position spends credit, `MIN_SHARE` of the device goes to the
        others, the one that was served longest ago first.
        """
        waiting, position = self._waiting, self._position
        first = min(flows, key=lambda flow: (position[flow], waiting[flow].first.number))
        if position[first] >= self._now or len(flows) == 1:
            return first
        others = (flow for flow in flows if flow != first)
        other = min(others, key=lambda flow: self._last_served.get(flow, 0))
        if self._deficit >= waiting[other].first.work_item.cost:
            self._deficit -= waiting[other].first.work_item.cost
            return other
        self._deficit += waiting[first].first.work_item.cost * MIN_SHARE / (1.0 - MIN_SHARE)
        return first


class _ServiceHistory:
    """Virtual time one window ago and the work served since, in `_HISTORY_SLOTS` slots."""

    def __init__(self) -> None:
        self._aged_s = 0.0
        self._served = 0.0
        self._slots = deque([(-math.inf, 0.0, 0.0)])

    def age(self, seconds: float) -> None:
        """Advance the history's clock."""
        self._aged_s += seconds

    def note(self, virtual: float, cost: float) -> None:
        """Record served work and the virtual time; a slot keeps its latest values."""
        self._served += cost
        since_s = self._slots[-1][0]
        if self._aged_s - since_s < WINDOW_S / _HISTORY_SLOTS:
            self._slots[-1] = (since_s, virtual, self._served)
        else:
            self._slots.append((self._aged_s, virtual, self._served))

    def window(self) -> tuple[float, float]:
        """Return the virtual time at the window's start, and the work served since."""
        slots, begin_s = self._slots, self._aged_s - WINDOW_S
        while len(slots) > 1 and slots[1][0] <= begin_s:
            slots.popleft()
        _, virtual, served = slots[0]
        return virtual, self._served - served
