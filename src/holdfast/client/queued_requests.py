"""Which requests wait in their engine's queue, and when to have their contexts prestaged.

An engine loads a context when it admits the request. A request that waits for its turn before does
nothing in that time, so its context is announced to the node, which reads it into memory. The node
keeps a prestaged context for a limited time; a request that still waits is announced again.
"""

from __future__ import annotations

AGAIN_S = 5.0
"""Time after which a request that still waits is announced again; nodes keep a context longer."""


class QueuedRequests:
    """The requests that their engine has not yet admitted, oldest first."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        self._announced: set[str] = set()

    def arrived(self, request_id: str) -> None:
        """Note that a request is in the queue."""
        self._next_s[request_id] = 0.0

    def left(self, request_id: str) -> None:
        """Note that a request was admitted, or needs no announcement, or ended."""
        self._next_s.pop(request_id, None)
        self._announced.discard(request_id)

    def take_announced(self, request_id: str) -> bool:
        """Return whether a request was announced since the last call."""
        is_announced = request_id in self._announced
        self._announced.discard(request_id)
        return is_announced

    def due(self, now_s: float) -> list[str]:
        """Return the waiting requests that are to be announced now."""
        return [request_id for request_id, at_s in self._next_s.items() if at_s <= now_s]

    def announced(self, request_id: str, now_s: float) -> None:
        """Note that a request was announced."""
        self._next_s[request_id] = now_s + AGAIN_S
        self._announced.add(request_id)
