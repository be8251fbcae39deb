"""Which requests wait in their engine's queue, and when to have their contexts prestaged.

An engine loads a context when it admits the request. A request that waits for its turn before does
nothing in that time, so its context is announced to the node, which reads it into memory. The node
keeps a prestaged context for a limited time; a request that still waits is announced again.
Requests that share a context need one announcement.
"""

from __future__ import annotations

from collections.abc import Mapping

AGAIN_S = 5.0
"""Time after which a request that still waits is announced again; nodes keep a context longer."""


class QueuedRequests:
    """The requests that their engine has not yet admitted, oldest first."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        self._announced: set[str] = set()
        self._sent_s: dict[bytes, float] = {}
        """When contexts were announced, by name; for `AGAIN_S`."""

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
        """Return the waiting requests that are to be announced now, oldest first."""
        return [request_id for request_id, at_s in self._next_s.items() if at_s <= now_s]

    def announce(self, contexts: Mapping[str, bytes], now_s: float) -> list[str]:
        """Note that due requests are announced; return those for which to send a message.

        `contexts`: for each request, oldest first, the name of what the node holds of its context.
        A context is sent once in `AGAIN_S`, for the oldest request that waits for it. The newest
        request is the first one of the answer: the node begins with the first context of which it
        is told, and the newest has the most time.
        """
        self._sent_s = {name: at_s for name, at_s in self._sent_s.items() if now_s < at_s + AGAIN_S}
        chosen = list[str]()
        for request_id, name in contexts.items():
            if name not in self._sent_s:
                self._sent_s[name] = now_s
                chosen.append(request_id)
            self._next_s[request_id] = self._sent_s[name] + AGAIN_S
            self._announced.add(request_id)
        return chosen[::-1]
