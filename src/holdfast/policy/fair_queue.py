"""Whose turn it is: work of several flows on one device, fair over the last few seconds.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): every flow has a place in virtual
time that moves on with its work divided by its weight, and the hindmost goes first. That is fair at
each moment only: who comes seldom gets half of the device while it is there, beside one who has had
all of it. So a flow that comes back may stand behind the others, as in borrowed virtual time (Duda
and Cheriton, SOSP 1999): as far as the clock moved within the last window. That is its credit, just
what another of its weight was served meanwhile; it is served first until that is spent. Who floods
has none, and flows that all flood are served by weight.

Nobody saves up more than a window. A part of the device, `LEAST`, goes round among the others while
somebody spends credit (a deficit counter as in Shreedhar and Varghese, SIGCOMM 1995), so nobody
starves either. Time in which nobody waits is soon forgotten: who used an idle device kept nobody
from it. Pure state: no clock, no threads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

WINDOW_S = 4.0
"""How far back it counts who was served: longer than most fetches, short enough to be forgiven."""

LEAST = 1 / 20
"""The part of the device that goes to the others while somebody is served on credit."""

IDLE_AGES = 8.0
"""A second in which nobody waits makes the past older by so many."""

_SLOTS = 64
_KEPT = 64

T = TypeVar("T")


class Terms(NamedTuple):
    """On what terms work waits: its weight, and what part of a window's credit it may have."""

    share: float = 1.0
    credit: float = 1.0


USUAL = Terms()
"""For a flow of which nothing is said."""


class _Work(NamedTuple, Generic[T]):
    number: int
    cost: float
    share: float
    item: T


def _anybody(flow: Hashable) -> bool:
    del flow
    return True


class FairQueue(Generic[T]):
    """Work waiting for one device. Not thread-safe. `take` costs a look at each flow that waits.

    Costs are in any unit that is the same for all, such as bytes.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._waiting: dict[Hashable, deque[_Work[T]]] = {}
        self._position: dict[Hashable, float] = {}
        self._last_turn: dict[Hashable, int] = {}
        self._now = 0.0
        self._foremost = 0.0
        self._past = _Past(window_s)
        self._told_s: float | None = None
        self._numbers = 0
        self._owed = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def advance(self, now: float) -> None:
        """Say what time it is, in monotonic seconds: before work is put or taken."""
        passed_s = 0.0 if self._told_s is None else max(0.0, now - self._told_s)
        self._told_s = now
        self._past.age(passed_s if self._waiting else IDLE_AGES * passed_s)

    def put(self, flow: Hashable, cost: float, item: T, terms: Terms = USUAL) -> None:
        """Queue work of a flow behind what it has waiting."""
        if flow not in self._waiting:
            self._position[flow] = self._start(flow, terms)
            self._waiting[flow] = deque()
        self._numbers += 1
        self._waiting[flow].append(_Work(self._numbers, cost, terms.share, item))

    def take(self, may: Callable[[Hashable], bool] = _anybody) -> tuple[Hashable, T] | None:
        """Return the flow whose turn it is, and its work; None where none waits that `may` go."""
        flows = list(filter(may, self._waiting))
        if not flows:
            return None
        self._now = max(self._now, min(map(self._position.__getitem__, self._waiting)))
        flow = self._next(flows)
        line = self._waiting[flow]
        work = line.popleft()
        if not line:
            del self._waiting[flow]
        self._numbers += 1
        self._last_turn[flow] = self._numbers
        self._serve(flow, work.cost, work.share)
        return flow, work.item

    def pass_by(self, flow: Hashable, cost: float, terms: Terms = USUAL) -> None:
        """Count work that is done at once, out of turn: `put` and `take` in one."""
        if flow not in self._waiting:
            self._position[flow] = self._start(flow, terms)
        self._serve(flow, cost, terms.share)

    def _serve(self, flow: Hashable, cost: float, share: float) -> None:
        self._position[flow] = at = self._position[flow] + cost / share
        self._foremost = max(self._foremost, at)
        # Nobody waits, so nobody has to make up for anything.
        if not self._waiting and self._foremost > self._now:
            self._now = self._foremost
        self._past.note(self._now, cost)
        if len(self._position) > 2 * len(self._waiting) + _KEPT:
            self._forget()

    def head(self, flow: Hashable) -> T:
        """Return what a flow that waits has next."""
        return self._waiting[flow][0].item

    def withdraw(self, flow: Hashable, unwanted: Callable[[T], bool]) -> list[T]:
        """Take a flow's work off the line that nobody wants any more; return it."""
        line = self._waiting.get(flow, deque())
        rest = deque(work for work in line if not unwanted(work.item))
        if rest:
            self._waiting[flow] = rest
        else:
            self._waiting.pop(flow, None)
        return [work.item for work in line if unwanted(work.item)]

    def refund(self, flow: Hashable, cost: float, share: float) -> None:
        """Take so much of the work that a flow was given for not done."""
        if flow in self._position:
            self._position[flow] -= cost / share

    def earliest(self, may: Callable[[Hashable], bool] = _anybody) -> float:
        """Return where, in virtual time, the hindmost stands of those that `may`; inf if none."""
        return min((self._position[flow] for flow in filter(may, self._waiting)), default=math.inf)

    def credit(self, flow: Hashable, terms: Terms = USUAL) -> float:
        """Return how much of its work would be done before that of others, if it came now."""
        waits = flow in self._waiting
        stands = self._position[flow] if waits else self._start(flow, terms)
        return max(0.0, (self._now - stands) * terms.share)

    def _start(self, flow: Hashable, terms: Terms) -> float:
        """Return where a flow that comes stands: where it was, or at most its credit behind.

        What another of its weight was served, and never more than the device did in all.
        """
        then, served = self._past.seen()
        behind = self._now - terms.credit * min(self._now - then, served / terms.share)
        return max(self._position.get(flow, behind), behind)

    def _next(self, flows: list[Hashable]) -> Hashable:
        """Return the hindmost; now and then, if it is served on credit, who waited longest."""
        waiting, position = self._waiting, self._position
        first = min(flows, key=lambda flow: (position[flow], waiting[flow][0].number))
        if position[first] >= self._now or len(flows) == 1:
            return first
        others = (flow for flow in flows if flow != first)
        other = min(others, key=lambda flow: self._last_turn.get(flow, 0))
        if self._owed >= waiting[other][0].cost:
            self._owed -= waiting[other][0].cost
            return other
        self._owed += waiting[first][0].cost * LEAST / (1.0 - LEAST)
        return first

    def _forget(self) -> None:
        """Drop the places of those who would stand there without them as well."""
        then, _ = self._past.seen()
        self._position = {
            flow: at for flow, at in self._position.items() if flow in self._waiting or at > then
        }
        self._last_turn = {flow: n for flow, n in self._last_turn.items() if flow in self._position}


class _Past:
    """Where virtual time stood a window ago, and what was served since, to a 64th of the window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._aged_s = 0.0
        self._served = 0.0
        self._slots = deque([(-math.inf, 0.0, 0.0)])

    def age(self, seconds: float) -> None:
        """Let time pass."""
        self._aged_s += seconds

    def note(self, virtual: float, cost: float) -> None:
        """Note work and where virtual time stands; a slot keeps what was so last."""
        self._served += cost
        since_s = self._slots[-1][0]
        if self._aged_s - since_s < self._window_s / _SLOTS:
            self._slots[-1] = (since_s, virtual, self._served)
        else:
            self._slots.append((self._aged_s, virtual, self._served))

    def seen(self) -> tuple[float, float]:
        """Return where virtual time stood when the window began, and the work done since."""
        slots, begin_s = self._slots, self._aged_s - self._window_s
        while len(slots) > 1 and slots[1][0] <= begin_s:
            slots.popleft()
        _, virtual, served = slots[0]
        return virtual, self._served - served
