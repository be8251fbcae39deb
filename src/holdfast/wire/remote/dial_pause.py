"""Pauses between the attempts to connect to a target that has no connection free."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_S = 0.1
LONGEST_S = 5.0
"""First and longest pause after a connection was turned away, in seconds, without the jitter."""

_JITTER = 0.25
"""A pause is longer by a random share of up to this, so that hosts do not try at the same time."""


class DialPause:
    """When to connect again to a target that turns connections away: each pause is twice as long.

    One attempt is made after each pause. `now_s` returns the time. Not thread-safe.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._next_s = FIRST_S
        self._until_s = 0.0
        self.is_turned_away = False
        """Whether the last attempt to end was turned away."""

    def left_s(self) -> float:
        """Return the seconds until the next attempt; 0 if it may be made now."""
        return max(0.0, self._until_s - self._now_s())

    def may_dial(self) -> bool:
        """Return whether the caller may connect now; if so after a pause, the next one begins."""
        if self.left_s():
            return False
        if self.is_turned_away:
            self._begin()
        return True

    def turned_away(self) -> None:
        """Note that an attempt was turned away."""
        self.is_turned_away = True
        if not self.left_s():
            self._begin()

    def end(self) -> None:
        """Note an attempt that ended otherwise: the next pause is a first one."""
        self._next_s, self._until_s, self.is_turned_away = FIRST_S, 0.0, False

    def _begin(self) -> None:
        jitter = _JITTER * random.random()  # noqa: S311  # no secret
        self._until_s = self._now_s() + (1 + jitter) * self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_S)
