"""Which member gets which segment: weighted rendezvous hashing, the same on every client.

Every member draws a number for a segment from a hash of both, stretched by its weight, and the
lowest number wins. So a member that leaves gives up its own segments and no others, one that joins
takes its share evenly from all, and no client needs to ask anybody. With u in (0, 1) from the hash
and w the weight, the number is -ln(u) / w: an exponential race, which member i wins with
probability w_i / sum(w).

A segment is a run of blocks of a chain, long so that a prefix survives the loss of a member:
docs/decisions has the figures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import xxhash

from holdfast.tiers.pool.members import Member

RANKED_MAX = 8
"""Members kept per segment: the owner, a second copy, and those that stand in for them."""

CACHED_SEGMENTS = 65_536
"""Ranked segments a placement remembers: about 10 MB, or 4 G tokens at the defaults."""

RAMP_STEPS = 16
"""A new member's share grows in so many steps, so that rankings can be remembered between."""

_HASH_BITS_DROPPED = 12
_STEP = 2.0**-52


def draw(segment_id: bytes, name: bytes, weight: float) -> float:
    """Return the member's number for the segment; the lowest wins.

    52 bits of the hash and a half: exact in a double, and never 0 or 1.
    """
    bits = xxhash.xxh3_64_intdigest(segment_id + name) >> _HASH_BITS_DROPPED
    return -math.log((bits + 0.5) * _STEP) / weight


def ramp_share(age_s: float, ramp_s: float) -> float:
    """Return the share of its weight that a member has so long after it joined: 1/16 up to 1."""
    if age_s >= ramp_s:
        return 1.0
    return min(RAMP_STEPS, math.floor(age_s / ramp_s * RAMP_STEPS) + 1) / RAMP_STEPS


class Placement:
    """The members that take segments, each with its weight at the moment. Immutable, any thread.

    `shares` scales the weight of members that are still warming up; the others have 1.
    """

    def __init__(self, members: Sequence[Member], shares: Mapping[str, float] | None = None):
        shares = shares or {}
        self._drawers = [
            (member.id.encode(), member.weight * shares.get(member.id, 1.0), member)
            for member in sorted(members, key=lambda member: member.id)
            if member.takes_segments
        ]
        self.members = tuple(member for _, _, member in self._drawers)
        self.rank: Callable[[bytes], tuple[Member, ...]]
        """The first RANKED_MAX members for a segment id, the owner first; remembered."""
        self.rank = functools.lru_cache(CACHED_SEGMENTS)(self._leaders)

    def order(self, segment_id: bytes) -> list[Member]:
        """Return all members for a segment, the owner first."""
        numbers = [
            (draw(segment_id, name, weight), number)
            for number, (name, weight, _) in enumerate(self._drawers)
        ]
        numbers.sort()
        return [self.members[number] for _, number in numbers]

    def weights(self) -> dict[str, float]:
        """Return each member's weight at the moment, for people to look at."""
        return {member.id: weight for _, weight, member in self._drawers}

    def _leaders(self, segment_id: bytes) -> tuple[Member, ...]:
        return tuple(self.order(segment_id)[:RANKED_MAX])
