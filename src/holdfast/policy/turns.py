"""Turns of domains at something that does a few pieces of work at once: who may go now; pure.

So many at once as a rule, in the order of a fair queue. Some places are spare: they are for domains
that come while others have all the rest, until those have had their turns.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from holdfast.policy.fair_queue import FairQueue, Terms

SEEN_S = 60.0
"""A domain that had work so lately may have some again at any moment."""

_SEEN_MAX = 1_024

T = TypeVar("T")


class Errand(float, enum.Enum):
    """Why something is read: somebody waits for it, or may want it later. Hashed as a number."""

    DEMAND = 1.0
    AHEAD = 1 / 16

    @property
    def weight(self) -> float:
        """Its weight beside what else is read for the same domain."""
        return float(self)

    @property
    def credit(self) -> float:
        """What part of a domain's credit it may use: none where nobody waits."""
        return float(self is Errand.DEMAND)


class Turn(NamedTuple):
    """Whose work it is, what it costs (in units that are the same for all), and the weight."""

    domain: bytes
    cost: float = 1.0
    share: float = 1.0
    errand: Errand = Errand.DEMAND

    @property
    def flow(self) -> Hashable:
        """What it waits behind."""
        return self.domain, self.errand

    @property
    def terms(self) -> Terms:
        """On what terms it waits."""
        return _terms(self.share, self.errand)


@lru_cache(maxsize=64)
def _terms(share: float, errand: Errand) -> Terms:
    return Terms(share * errand.weight, errand.credit)


class Turns(Generic[T]):
    """Work that waits and work under way, by domain. Not thread-safe; times in monotonic seconds.

    `usual` pieces are under way at once, and `spare` more of domains that have few.
    """

    def __init__(self, usual: int, spare: int) -> None:
        self._usual = usual
        self._most = usual + spare
        self._queue: FairQueue[tuple[Turn, T]] = FairQueue()
        self._under_way: Counter[bytes] = Counter()
        self._seen: dict[bytes, float] = {}

    def __len__(self) -> int:
        """Return how much waits."""
        return len(self._queue)

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits; a look that needs no lock."""
        return bool(self._queue)

    @property
    def empty(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._under_way and not self._queue

    def put(self, turn: Turn, item: T, now: float) -> None:
        """Queue work."""
        self._see(turn.domain, now)
        self._queue.advance(now)
        self._queue.put(turn.flow, turn.cost, (turn, item), turn.terms)

    def begin(self, turn: Turn, now: float) -> bool:
        """Whether work may begin without waiting; it is counted as under way then."""
        if self._queue or self._under_way.total() >= self._usual:
            return False
        self.slip(turn, now)
        self._under_way[turn.domain] += 1
        return True

    def slip(self, turn: Turn, now: float) -> None:
        """Count work that was or is done out of turn: nobody waited, or it is too small to."""
        self._see(turn.domain, now)
        self._queue.advance(now)
        self._queue.pass_by(turn.flow, turn.cost, turn.terms)

    def take(self, now: float) -> tuple[Turn, T] | None:
        """Return what may begin now, and count it as under way; None if nothing may.

        Beyond the usual places, only who is first in turn and has fewer than are still spare.
        """
        queue = self._queue
        queue.advance(now)
        if self._under_way.total() < self._usual:
            taken = queue.take()
        elif queue and queue.earliest(self._has_few) <= queue.earliest():
            taken = queue.take(self._has_few)
        else:
            taken = None
        if taken is None:
            return None
        self._under_way[taken[1][0].domain] += 1
        return taken[1]

    def withdraw(self, turn: Turn, item: T) -> None:
        """Take work off the line that nobody wants any more."""
        self._queue.withdraw(turn.flow, lambda entry: entry[1] is item)

    def hurry(self, turn: Turn, wanted: Callable[[T], bool], now: float) -> None:
        """Let work that is in line for later stand where what somebody waits for stands."""
        demand = turn._replace(errand=Errand.DEMAND)
        for _, item in self._queue.withdraw(turn.flow, lambda entry: wanted(entry[1])):
            self.put(demand, item, now)

    def done(self, turn: Turn, undone: float = 0.0) -> None:
        """Count work as over; so much of its cost was not done, and nobody pays for that."""
        if undone:
            self._queue.refund(turn.flow, undone, turn.terms.share)
        self._under_way[turn.domain] -= 1
        if not self._under_way[turn.domain]:
            del self._under_way[turn.domain]

    def credit(self, turn: Turn, now: float) -> float:
        """Return how much work, by its cost, would be done for a domain before that of others."""
        self._queue.advance(now)
        return self._queue.credit(turn.flow, turn.terms)

    def shared(self, domain: bytes, now: float) -> bool:
        """Return whether other domains had work here lately."""
        return any(now - at < SEEN_S for other, at in self._seen.items() if other != domain)

    def clear(self) -> list[T]:
        """Take off what waits, and return it."""
        waiting = []
        while (taken := self._queue.take()) is not None:
            waiting.append(taken[1][1])
        return waiting

    def _see(self, domain: bytes, now: float) -> None:
        self._seen[domain] = now
        if len(self._seen) > _SEEN_MAX:
            self._seen = {d: at for d, at in self._seen.items() if now - at < SEEN_S}

    def _has_few(self, flow: Hashable) -> bool:
        domain: bytes = flow[0]  # type: ignore[index]
        return self._under_way[domain] < self._most - self._under_way.total()
