"""Hot segments: the most requested segments, in fixed memory (the space-saving sketch).

Metwally, Agrawal, El Abbadi, "Efficient computation of frequent and top-k elements in data streams"
(2005). Of N hits, every segment with more than N / capacity is kept, and its count is too high by
`error` at most. Counts are halved every `half_life_s`. The result decides which segments deserve a
second copy, not which blocks to keep. A hit is a read of a segment's first block, so a fetch counts
once whatever its size.
"""

from __future__ import annotations

import heapq
import threading
from typing import NamedTuple

from holdfast.clock import Clock

CAPACITY = 1024
HALF_LIFE_S = 60.0
HOT_HITS = 60
"""Hits, halved every minute, from which a segment is hot: always reached at 64 reads a minute,
never below 30."""


class SegmentCount(NamedTuple):
    """A segment's hits: at least `hits - error`, at most `hits`."""

    hits: int
    error: int


class HotSegments:
    """Counts hits by segment. Thread-safe."""

    def __init__(
        self,
        clock: Clock,
        capacity: int = CAPACITY,
        half_life_s: float = HALF_LIFE_S,
        hot_hits: int = HOT_HITS,
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._half_life_s = half_life_s
        self._hot_hits = hot_hits
        self._counts: dict[bytes, SegmentCount] = {}
        # One entry per segment. Its hits may be out of date; `_admit` corrects an entry when it
        # reaches the top, so that a hit on a known segment updates only the dictionary.
        self._heap: list[tuple[int, bytes]] = []
        self._halved_s = clock.now()
        self._lock = threading.Lock()

    def hit(self, segment_id: bytes) -> bool:
        """Count one hit; return whether the segment is hot now."""
        with self._lock:
            self._halve()
            count = self._counts.get(segment_id) or self._admit(segment_id)
            count = count._replace(hits=count.hits + 1)
            self._counts[segment_id] = count
            return count.hits - count.error >= self._hot_hits

    def is_hot(self, segment_id: bytes) -> bool:
        """Return whether a segment certainly has enough hits to be hot."""
        with self._lock:
            self._halve()
            count = self._counts.get(segment_id)
            return count is not None and count.hits - count.error >= self._hot_hits

    def _admit(self, segment_id: bytes) -> SegmentCount:
        """Replace the coldest segment by a new one, with the old count as the error."""
        if len(self._counts) < self._capacity:
            heapq.heappush(self._heap, (0, segment_id))
            return SegmentCount(0, 0)
        while True:
            hits, coldest = self._heap[0]
            actual = self._counts[coldest].hits
            if hits == actual:
                break
            heapq.heapreplace(self._heap, (actual, coldest))
        del self._counts[coldest]
        heapq.heapreplace(self._heap, (hits, segment_id))
        return SegmentCount(hits, hits)

    def _halve(self) -> None:
        now_s = self._clock.now()
        times = int((now_s - self._halved_s) / self._half_life_s)
        if not times:
            return
        self._halved_s += times * self._half_life_s
        self._counts = {
            segment_id: SegmentCount(hits >> times, error >> times)
            for segment_id, (hits, error) in self._counts.items()
            if hits >> times
        }
        self._heap = [(count.hits, segment_id) for segment_id, count in self._counts.items()]
        heapq.heapify(self._heap)
