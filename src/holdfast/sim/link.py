"""A simulated link: bandwidth that concurrent transfers share fairly, on a virtual clock.

Processor sharing by virtual time (Parekh and Gallager, 1993): all running transfers have the same
rate, so a running total of the bytes served to each determines when each one ends. A transfer costs
O(log n), independent of the number of rate changes.
"""

from __future__ import annotations

import heapq
import math


class SharedLink:
    """`bytes_per_s` shared by all transfers, with at most `each_bytes_per_s` for one transfer."""

    def __init__(self, bytes_per_s: float, each_bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self.each_bytes_per_s = each_bytes_per_s
        self.version = 0
        """Increases when `next_end` changes: an event scheduled for an older version is stale."""
        self._ends: list[tuple[float, int]] = []
        self._served = 0.0
        self._at = 0.0
        self._sum_ends = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def start(self, now_s: float, nbytes: float, transfer: int) -> None:
        """Start a transfer of `nbytes`, identified by its number."""
        self._advance(now_s)
        end = self._served + nbytes
        heapq.heappush(self._ends, (end, transfer))
        self._sum_ends += end
        self.version += 1

    def next_end(self) -> float:
        """Return when the next transfer ends, if none starts before; inf if idle."""
        if not self._ends:
            return math.inf
        left = self._ends[0][0] - self._served
        return self._at + left / self._rate() if left > 0.0 else self._at

    def finish(self, now_s: float) -> int:
        """End the transfer of `next_end` now; return its number."""
        end, transfer = heapq.heappop(self._ends)
        self._served, self._at = end, now_s
        self._sum_ends -= end
        self.version += 1
        if not self._ends:
            self._served = self._sum_ends = 0.0
        return transfer

    def cancel(self, now_s: float, transfer: int) -> float:
        """Cancel a transfer; return the bytes that have not moved, 0 if it has ended already."""
        self._advance(now_s)
        for at, (end, number) in enumerate(self._ends):
            if number == transfer:
                self._ends[at] = self._ends[-1]
                self._ends.pop()
                heapq.heapify(self._ends)
                self._sum_ends -= end
                self.version += 1
                return max(0.0, end - self._served)
        return 0.0

    def queued_bytes(self, now_s: float) -> float:
        """Return the bytes left to move, over all transfers."""
        self._advance(now_s)
        return max(0.0, self._sum_ends - len(self._ends) * self._served)

    def _rate(self) -> float:
        share, most = self.bytes_per_s / len(self._ends), self.each_bytes_per_s
        return share if share < most else most  # noqa: FURB136  # a call takes longer

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._served += (now_s - self._at) * self._rate()
        self._at = now_s


class Writer:
    """Bandwidth of sequential writes, with a limit `wait_max_s` on the queue."""

    def __init__(self, bytes_per_s: float, wait_max_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._wait_max_s = wait_max_s
        self._busy_until_s = 0.0

    def free_bytes(self, now_s: float) -> float:
        """Return the bytes that the queue can still take."""
        waiting_s = self._busy_until_s - now_s
        if waiting_s <= 0.0:
            return self._wait_max_s * self.bytes_per_s
        return max(0.0, self._wait_max_s - waiting_s) * self.bytes_per_s

    def write(self, now_s: float, nbytes: float) -> None:
        """Queue a write of `nbytes`."""
        busy_s = self._busy_until_s
        begin_s = busy_s if busy_s > now_s else now_s  # noqa: FURB136  # a call takes longer
        self._busy_until_s = begin_s + nbytes / self.bytes_per_s
