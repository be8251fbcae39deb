"""Placement of segments on pool members: weighted rendezvous hashing, equal on every client.

The score of a member for a segment is -ln(u) / w, with u in (0, 1) from a hash of both and w the
member's weight. The member with the lowest score owns the segment. So member i owns a share of
w_i / sum(w) of the segments; only the segments of a member that leaves move; a member that joins
takes its share evenly from all others; and clients need no coordination.

A segment is a run of blocks of a chain, long enough that a prefix survives the loss of a member:
docs/decisions has the figures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import xxhash

from holdfast.membership.members import Member

RANKED_MAX = 8
"""Members kept per segment: the owner, a second copy, and their replacements."""

CACHED_SEGMENTS = 65_536
"""Rankings that a placement caches: about 10 MB, or 4 G tokens at the defaults."""

RAMP_STEPS = 16
"""Steps in which a new member's weight grows; rankings are cached between two steps."""

_HASH_BITS_DROPPED = 12
_STEP = 2.0**-52


def draw(segment_id: bytes, name: bytes, weight: float) -> float:
    """Return the member's score for the segment; the lowest owns it.

    u is (52 bits of the hash + 0.5) / 2^52: exact in a double, and never 0 or 1.
    """
    bits = xxhash.xxh3_64_intdigest(segment_id + name) >> _HASH_BITS_DROPPED
    return -math.log((bits + 0.5) * _STEP) / weight


def ramp_share(age_s: float, ramp_s: float) -> float:
    """Return the share of its weight that a member has `age_s` after it joined: 1/16 up to 1."""
    if age_s >= ramp_s:
        return 1.0
    return min(RAMP_STEPS, math.floor(age_s / ramp_s * RAMP_STEPS) + 1) / RAMP_STEPS


class Placement:
    """Ranks the members that take segments by their current weight. Immutable and thread-safe.

    `shares` has the share of its weight that each member which is still warming up has.
    """

    def __init__(self, members: Sequence[Member], shares: Mapping[str, float] | None = None):
        shares = shares or {}
        self._weighted = [
            (member.id.encode(), member.weight * shares.get(member.id, 1.0), member)
            for member in sorted(members, key=lambda member: member.id)
            if member.takes_segments
        ]
        self.members = tuple(member for _, _, member in self._weighted)
        self.rank: Callable[[bytes], tuple[Member, ...]]
        """Return the first RANKED_MAX members for a segment id, the owner first. Cached."""
        self.rank = functools.lru_cache(CACHED_SEGMENTS)(
            lambda segment_id: tuple(self.order(segment_id)[:RANKED_MAX])
        )

    def order(self, segment_id: bytes) -> list[Member]:
        """Return all members for a segment, the owner first."""
        scores = [
            (draw(segment_id, name, weight), number)
            for number, (name, weight, _) in enumerate(self._weighted)
        ]
        scores.sort()
        return [self.members[number] for _, number in scores]

    def weights(self) -> dict[str, float]:
        """Return each member's current weight, for status output."""
        return {member.id: weight for _, weight, member in self._weighted}
