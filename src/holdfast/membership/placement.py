"""Placement of segments on pool members: weighted rendezvous hashing, equal on every client.

The score of a member for a segment is -ln(u) / w, with u in (0, 1) from a hash of both and w the
member's weight. The member with the lowest score owns the segment. So member i owns a share of
w_i / sum(w) of the segments; only the segments of a member that leaves move; a member that joins
takes its share evenly from all others; and clients need no coordination.

A segment is a run of blocks of a chain. Its blocks are on one member, or striped: spread over the
first members of its ranking (*lanes*), in turn. docs/decisions has the figures.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import xxhash

from holdfast.limits import STRIPE_MEMBERS_MIN
from holdfast.membership.members import Member

RANKED_MAX = 8
"""Members kept per segment: the owner, a second copy, and their replacements."""

CACHED_SEGMENTS = 65_536
"""Rankings that a placement caches: about 10 MB, or 4 G tokens at the defaults."""

STAND_INS = 3
"""Members kept per striped segment beside those of its lanes."""

RAMP_STEPS = 16
"""Steps in which a new member's weight grows; rankings are cached between two steps."""

SHARE_SAMPLES = 1_024

LANE_SEED = 1
"""Seed of the hash by which members draw lanes; that of the ranking is 0."""

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

    `shares` has the share of its weight that each member which is still warming up has. `stripe`:
    the most members over which the blocks of a segment are spread; 1: one member has them all.
    """

    def __init__(
        self,
        members: Sequence[Member],
        shares: Mapping[str, float] | None = None,
        stripe: int = 1,
    ):
        shares = shares or {}
        self._weighted = [
            (member.id.encode(), member.weight * shares.get(member.id, 1.0), member)
            for member in sorted(members, key=lambda member: member.id)
            if member.takes_segments
        ]
        self.members = tuple(member for _, _, member in self._weighted)
        self._stripe = stripe
        count = len(self.members)
        self.lanes = min(stripe, count) if count >= STRIPE_MEMBERS_MIN else 1
        """Number of members over which a segment is striped: block i is on lane `i % lanes`."""
        ranked_max = max(RANKED_MAX, stripe + STAND_INS)
        self.rank: Callable[[bytes], tuple[Member, ...]]
        """Return the first members for a segment id, RANKED_MAX or more, owner first. Cached."""
        self.rank = functools.lru_cache(CACHED_SEGMENTS)(
            lambda segment_id: tuple(self.order(segment_id)[:ranked_max])
        )

        self.owners: Callable[[bytes], tuple[Member, ...]]
        """Return the owners of a segment's lanes, by lane. Cached."""
        self.owners = functools.lru_cache(CACHED_SEGMENTS)(self._owners)

    def rank_block(self, segment_id: bytes, block: int) -> tuple[Member, ...]:
        """Return members for a block of a segment, the owner of its lane first, then stand-ins.

        `block` is its number in the segment. The members of other lanes are the last stand-ins.
        """
        ranked, owners, lane = self.rank(segment_id), self.owners(segment_id), block % self.lanes
        others = owners[lane + 1 :] + owners[:lane]
        return owners[lane : lane + 1] + ranked[self.lanes :] + others

    def _owners(self, segment_id: bytes) -> tuple[Member, ...]:
        """Give each of the first members of the ranking the lane that it draws, or the next free.

        So most lanes keep their owner if one of the members is another.
        """
        lanes: list[Member | None] = [None] * self.lanes
        for member in self.rank(segment_id)[: self.lanes]:
            lane = xxhash.xxh3_64_intdigest(segment_id + member.id.encode(), LANE_SEED) % self.lanes
            while lanes[lane] is not None:
                lane = (lane + 1) % self.lanes
            lanes[lane] = member
        return tuple(member for member in lanes if member is not None)

    def holders(self, segment_id: bytes) -> tuple[Member, ...]:
        """Return all members that may hold blocks of a segment since its lanes were others.

        One that joins or leaves changes one of them, while it may move every lane.
        """
        return self.rank(segment_id)[: self._stripe]

    def order(self, segment_id: bytes) -> list[Member]:
        """Return all members for a segment, the owner first."""
        scores = [
            (draw(segment_id, name, weight), number)
            for number, (name, weight, _) in enumerate(self._weighted)
        ]
        scores.sort()
        return [self.members[number] for _, number in scores]

    @functools.cached_property
    def shares(self) -> Mapping[str, float]:
        """Return each member's share of blocks; the shares sum up to 1.

        By weight, as long as lanes leave a choice: with as many lanes as members all are equal.
        Between these cases it is estimated from `SHARE_SAMPLES` segments.
        """
        if self.lanes == 1:
            total = sum(weight for _, weight, _ in self._weighted)
            return {member.id: weight / total for _, weight, member in self._weighted}
        counted = Counter[str]()
        samples = SHARE_SAMPLES if self.lanes < len(self.members) else 1
        for number in range(samples):
            owners = self.owners(xxhash.xxh3_64_digest(number.to_bytes(8, "little")))
            counted.update(member.id for member in owners)
        return {member.id: counted[member.id] / counted.total() for member in self.members}
