"""Backoff of a timeout: halved by every late answer, restored by the next one in time."""

from __future__ import annotations

MIN_SHARE = 1 / 64
"""Smallest share of the limit that a timeout shrinks to."""


class Backoff:
    """A timeout that shrinks while a node does not answer, which bounds the total wait for it.

    The first wait has the full timeout; each late answer halves the next one, down to `MIN_SHARE`.
    """

    def __init__(self) -> None:
        self._share = 1.0

    def timeout_s(self, limit_s: float) -> float:
        """Return how long to wait for the next answer, at most `limit_s`."""
        return limit_s * self._share

    def late(self) -> None:
        """Note that an answer did not arrive in time."""
        self._share = max(self._share / 2, MIN_SHARE)

    def answered(self) -> None:
        """Note that an answer arrived."""
        self._share = 1.0
