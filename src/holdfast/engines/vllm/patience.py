"""How long to wait for a node: less after every answer that did not come, all again after one."""

from __future__ import annotations

LEAST = 1 / 64


class Patience:
    """A time limit that a silent node wears out, so that in sum it costs next to nothing.

    The first wait is as long as it may be, each one after a loss half as long, down to a 64th.
    """

    def __init__(self) -> None:
        self._share = 1.0

    def of(self, limit_s: float) -> float:
        """Return how long to wait for the next answer, of the seconds one may."""
        return limit_s * self._share

    def lost(self) -> None:
        """Note that an answer did not come in time."""
        self._share = max(self._share / 2, LEAST)

    def met(self) -> None:
        """Note that an answer came."""
        self._share = 1.0
