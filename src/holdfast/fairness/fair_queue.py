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

import math
from collections import deque
from collections.abc import Callable, Hashable
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
"""Number of idle flows, beyond the number of waiting ones, at which old positions are dropped."""

T = TypeVar("T")


class DomainTerms(NamedTuple):
    """Scheduling terms of a flow: its weight, and the fraction of a window's credit it may have."""

    share: float = 1.0
    credit: float = 1.0


DEFAULT_TERMS = DomainTerms()


class _Work(NamedTuple, Generic[T]):
    number: int
    cost: float
    share: float
    item: T


def _any_flow(flow: Hashable) -> bool:
    del flow
    return True


class FairQueue(Generic[T]):
    """Work waiting for one device. Not thread-safe. `take` is linear in the waiting flows.

    Costs are in any unit common to all flows, such as bytes.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._waiting: dict[Hashable, deque[_Work[T]]] = {}
        self._position: dict[Hashable, float] = {}
        self._last_served: dict[Hashable, int] = {}
        self._now = 0.0
        self._highest = 0.0
        self._history = _ServiceHistory(window_s)
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

    def put(self, flow: Hashable, cost: float, item: T, terms: DomainTerms = DEFAULT_TERMS) -> None:
        """Append work to a flow's queue."""
        if flow not in self._waiting:
            self._position[flow] = self._start(flow, terms)
            self._waiting[flow] = deque()
        self._numbers += 1
        self._waiting[flow].append(_Work(self._numbers, cost, terms.share, item))

    def take(self, eligible: Callable[[Hashable], bool] = _any_flow) -> tuple[Hashable, T] | None:
        """Remove and return the next flow and its work; None if no eligible flow waits."""
        flows = list(filter(eligible, self._waiting))
        if not flows:
            return None
        self._now = max(self._now, min(map(self._position.__getitem__, self._waiting)))
        flow = self._next(flows)
        queued = self._waiting[flow]
        work = queued.popleft()
        if not queued:
            del self._waiting[flow]
        self._numbers += 1
        self._last_served[flow] = self._numbers
        self._serve(flow, work.cost, work.share)
        return flow, work.item

    def charge(self, flow: Hashable, cost: float, terms: DomainTerms = DEFAULT_TERMS) -> None:
        """Account for work that bypasses the queue: `put` and `take` in one."""
        if flow not in self._waiting:
            self._position[flow] = self._start(flow, terms)
        self._serve(flow, cost, terms.share)

    def _serve(self, flow: Hashable, cost: float, share: float) -> None:
        self._position[flow] = at = self._position[flow] + cost / share
        self._highest = max(self._highest, at)
        # With an empty queue, no flow has fallen behind another.
        if not self._waiting and self._highest > self._now:
            self._now = self._highest
        self._history.note(self._now, cost)
        if len(self._position) > 2 * len(self._waiting) + _MAX_IDLE_POSITIONS:
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

    def head(self, flow: Hashable) -> T:
        """Return the next work of a waiting flow, without removing it."""
        return self._waiting[flow][0].item

    def withdraw(self, flow: Hashable, cancelled: Callable[[T], bool]) -> list[T]:
        """Remove and return the waiting work of a flow for which `cancelled` is true."""
        queued = self._waiting.get(flow, deque())
        rest = deque(work for work in queued if not cancelled(work.item))
        if rest:
            self._waiting[flow] = rest
        else:
            self._waiting.pop(flow, None)
        return [work.item for work in queued if cancelled(work.item)]

    def refund(self, flow: Hashable, cost: float, share: float) -> None:
        """Return the part `cost` of taken work that was not done to the flow."""
        if flow in self._position:
            self._position[flow] -= cost / share

    def earliest(self, eligible: Callable[[Hashable], bool] = _any_flow) -> float:
        """Return the lowest position, in virtual time, of eligible waiting flows; inf if none."""
        positions = (self._position[flow] for flow in filter(eligible, self._waiting))
        return min(positions, default=math.inf)

    def credit(self, flow: Hashable, terms: DomainTerms = DEFAULT_TERMS) -> float:
        """Return the cost of work that a flow could have served ahead of others now."""
        waits = flow in self._waiting
        position = self._position[flow] if waits else self._start(flow, terms)
        return max(0.0, (self._now - position) * terms.share)

    def _start(self, flow: Hashable, terms: DomainTerms) -> float:
        """Return the position of an arriving flow: its old one, or `now` less its credit.

        The credit is what a flow of its weight was served in the window, at most all work served.
        """
        then, served = self._history.window()
        behind = self._now - terms.credit * min(self._now - then, served / terms.share)
        return max(self._position.get(flow, behind), behind)

    def _next(self, flows: list[Hashable]) -> Hashable:
        """Return the flow with the lowest position, or another one for its part of `MIN_SHARE`.

        If the flow with the lowest position spends credit, `MIN_SHARE` of the device goes to the
        others, the one that was served longest ago first.
        """
        waiting, position = self._waiting, self._position
        first = min(flows, key=lambda flow: (position[flow], waiting[flow][0].number))
        if position[first] >= self._now or len(flows) == 1:
            return first
        others = (flow for flow in flows if flow != first)
        other = min(others, key=lambda flow: self._last_served.get(flow, 0))
        if self._deficit >= waiting[other][0].cost:
            self._deficit -= waiting[other][0].cost
            return other
        self._deficit += waiting[first][0].cost * MIN_SHARE / (1.0 - MIN_SHARE)
        return first


class _ServiceHistory:
    """Virtual time one window ago and the work served since, in `_HISTORY_SLOTS` slots."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
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
        if self._aged_s - since_s < self._window_s / _HISTORY_SLOTS:
            self._slots[-1] = (since_s, virtual, self._served)
        else:
            self._slots.append((self._aged_s, virtual, self._served))

    def window(self) -> tuple[float, float]:
        """Return the virtual time at the window's start, and the work served since."""
        slots, begin_s = self._slots, self._aged_s - self._window_s
        while len(slots) > 1 and slots[1][0] <= begin_s:
            slots.popleft()
        _, virtual, served = slots[0]
        return virtual, self._served - served
