"""Questions to shared tiers: those who ask the same at once ask once, and a no is good for a while.

A thousand requests that begin with the same new segment would else be a thousand questions to its
target, just when it is busiest. State only, under the store's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeAlias

NO_S = 0.25
"""For how long a tier is believed not to have got a block meanwhile."""

NOES_MAX = 4_096

Name: TypeAlias = tuple[int, bytes]
"""A tier's number and the key of the first block that is asked about."""


class Asking:
    """What is being asked, and what was not there a moment ago."""

    def __init__(self) -> None:
        self._under_way: dict[Name, threading.Event] = {}
        self._noes: OrderedDict[Name, float] = OrderedDict()

    def begin(self, name: Name, now_s: float) -> threading.Event | None:
        """Return None to whoever is to ask, and must `end` it; else what to wait for.

        The event is set already where the answer was no a moment ago.
        """
        under_way = self._under_way.get(name)
        if under_way is not None:
            return under_way
        if now_s - self._noes.get(name, -NO_S) < NO_S:
            told = threading.Event()
            told.set()
            return told
        self._under_way[name] = threading.Event()
        return None

    def end(self, name: Name, found: int, now_s: float) -> None:
        """Tell those who wait that the answer is here; `found` 0 is a no."""
        self._under_way.pop(name).set()
        self._noes.pop(name, None)
        if not found:
            self._noes[name] = now_s
            if len(self._noes) > NOES_MAX:
                self._noes.popitem(last=False)
