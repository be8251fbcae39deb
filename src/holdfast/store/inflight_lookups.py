"""Single-flight lookups of shared tiers: equal lookups share one question, misses are cached.

Without it, a thousand requests that begin with one new segment would ask its target a thousand
times, just when it is busiest. State only: call under the store's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome

NO_S = 0.25
"""How long a miss stays valid, in seconds."""

NOES_MAX = 4_096

Name: TypeAlias = tuple[int, Namespace, bytes]
"""Tier number, and namespace and key of the first block looked up."""


class InflightLookup(threading.Event):
    """A lookup in flight or just answered; the event is set once `outcome` is known.

    `outcome` is OK if the tier answered, whether it holds the block or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outcome = Outcome.LATE

    def tell(self, outcome: Outcome) -> None:
        """Set the outcome and wake the waiting callers."""
        self.outcome = outcome
        self.set()


class InflightLookups:
    """Lookups in flight, and recent misses."""

    def __init__(self) -> None:
        self._under_way: dict[Name, InflightLookup] = {}
        self._noes: OrderedDict[Name, tuple[float, Outcome]] = OrderedDict()

    def begin(self, name: Name, now_s: float) -> InflightLookup | None:
        """Return None if the caller must ask the tier and call `end`, else the lookup to wait for.

        A returned lookup is already set if the tier missed, or did not answer, within `NO_S`.
        """
        under_way = self._under_way.get(name)
        if under_way is not None:
            return under_way
        no_s, outcome = self._noes.get(name, (-NO_S, Outcome.OK))
        if now_s - no_s < NO_S:
            told = InflightLookup()
            told.tell(outcome)
            return told
        self._under_way[name] = InflightLookup()
        return None

    def end(self, name: Name, found: int, now_s: float, outcome: Outcome = Outcome.OK) -> None:
        """Finish a lookup and wake the waiting callers; `found` is the number of blocks held."""
        self._under_way.pop(name).tell(outcome)
        self._noes.pop(name, None)
        if not found:
            self._noes[name] = now_s, outcome
            if len(self._noes) > NOES_MAX:
                self._noes.popitem(last=False)
