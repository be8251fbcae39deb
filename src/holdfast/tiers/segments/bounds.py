"""Which segments leave a medium: by age, by bytes, and for whom it is to delete them; pure.

Every writer deletes its own segments. Those of a writer that has died belong to one of the live
ones, which all choose by the same rule. If two writers disagree about who is alive, both delete the
same segment, which does no harm: a segment is a cache, and its name is never used again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast.tiers.segments.format import AGE_CLASSES, SegmentName
from holdfast.tiers.segments.index import SegmentState

FILL_MAX = 0.95
"""Fraction of the capacity above which segments are retired."""

FILL_AIM = 0.9
"""Fraction of the capacity that is left after that."""

NEAR_END = 0.25
"""Fraction of its age class before a segment's end in which a read saves its blocks again."""

AGED = 0.25
"""Fraction of its age class by which a new segment must outlast another one, for durable blocks to
be written again: each acknowledgement finds at least the rest of that time left."""

_SPARSE = 0.5
"""Fraction of live blocks below which a segment is less valuable than any other."""


class SpaceLimits(NamedTuple):
    """`capacity_bytes` bounds the segments of all writers below one root; 0: no bound.

    `segments`: most segments that leave at once to make room.
    """

    capacity_bytes: int
    segments: int = sys.maxsize

    def without(self, nbytes: int) -> SpaceLimits:
        """Return the limits of the room that is left beside `nbytes` that cannot be deleted."""
        left_bytes = self.capacity_bytes and max(1, self.capacity_bytes - nbytes)
        return self._replace(capacity_bytes=left_bytes)


def responsible_writer(writer: str, live: Iterable[str]) -> str:
    """Return which of the live writers deletes the segments of `writer`: itself if it is live."""
    living = set(live)
    if writer in living:
        return writer

    def weight(each: str) -> bytes:
        return hashlib.blake2b(f"{each}{writer}".encode(), digest_size=8).digest()

    return max(living, key=weight, default="")


def to_retire(
    states: Sequence[SegmentState],
    is_mine: Callable[[SegmentName], bool],
    limits: SpaceLimits,
    wall_s: float,
) -> list[SegmentName]:
    """Return the segments that this writer retires now.

    These are the ones past their end, those without live blocks and, if the medium is nearly full,
    its share of the least valuable ones. That share is its share of the bytes, so that all writers
    together delete about the excess. A segment with durable blocks leaves at its end only.
    """
    mine = [state for state in states if is_mine(state.name)]
    free = [state for state in mine if state.durable_until_s <= wall_s]
    leaving = {state.name for state in mine if state.name.expires_s() <= wall_s}
    leaving |= {state.name for state in free if not state.live_blocks}
    total = sum(state.nbytes for state in states)
    capacity = limits.capacity_bytes
    if capacity and total > FILL_MAX * capacity:
        free_bytes = sum(state.nbytes for state in states if state.durable_until_s <= wall_s)
        own_share = sum(state.nbytes for state in free) / max(1, free_bytes)
        excess = (total - FILL_AIM * capacity) * own_share
        excess -= sum(state.nbytes for state in mine if state.name in leaving)
        staying = sorted((state for state in free if state.name not in leaving), key=_value)
        for state in staying[: limits.segments]:
            if excess <= 0:
                break
            leaving.add(state.name)
            excess -= state.nbytes
    return [state.name for state in mine if state.name in leaving]


def is_near_end(name: SegmentName, wall_s: float) -> bool:
    """Return whether a segment that is read now should be saved again."""
    left_s = name.expires_s() - wall_s
    return 0 < left_s < NEAR_END * AGE_CLASSES[name.age_class]


def _value(state: SegmentState) -> tuple[bool, float, str]:
    """Order segments, the least valuable first: sparse ones, then by the time of the last use."""
    is_dense = state.live_blocks >= _SPARSE * state.blocks
    return is_dense, state.used_s, state.name.number
