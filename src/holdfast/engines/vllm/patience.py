"""How long to wait for a node: less after every answer that did not come, all again after one."""

from __future__ import annotations

LEAST = 1 / 64


class Patience:
    """A time limit that a silent node wears out, so that in sum it costs next to nothing.

    The first wait is `limit_s`, each one after a loss half as long, down to a 64th.
    """

    def __init__(self, limit_s: float) -> None:
        self._whole_s = limit_s
        self._share = 1.0

    @property
    def limit_s(self) -> float:
        """Seconds to wait for the next answer."""
        return self._whole_s * self._share

    def lost(self) -> None:
        """Note that an answer did not come in time."""
        self._share = max(self._share / 2, LEAST)

    def met(self) -> None:
        """Note that an answer came."""
        self._share = 1.0
