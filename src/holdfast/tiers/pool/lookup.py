"""The members to read a segment from and to write it to, while members join, leave and fail.

    write to    the first `copies` available members of the ranking: the owner, or the next in rank
                instead; a failure moves no segment
    read from   the same, then members that other hosts may have written to: the next in rank
                during and after a failure; the owner by full weights while a member is warming up
                (a process that started later uses full weights); the owners of the previous view;
                and, in a process that started lately, the next `UNSEEN_COPIES` in rank

The ranking is that of a block: the owner of its lane comes first (`Placement.rank_block`). With one
lane it is that of its segment.

A member that holds a block serves it whatever the epoch, so reading by an old view is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from holdfast.membership.members import Member
from holdfast.membership.membership import Membership, PoolViews, WeightedView
from holdfast.membership.placement import Placement

UNSEEN_COPIES = 2
"""Further members that a freshly started process asks on a miss: no block is missed if at most this
number of members joined shortly before it started."""


class Route(NamedTuple):
    """Members for one segment, best first.

    `write` has fewer than `copies` members if fewer are available. Its first `owners` are owners by
    the ranking; the others replace owners and have only recent records. `read` begins with `write`
    and has no member twice.
    """

    write: tuple[Member, ...]
    read: tuple[Member, ...]
    owners: int


class _Placements(NamedTuple):
    """Views, the current members by id, and the placements of the views."""

    views: PoolViews
    by_id: dict[str, Member]
    current: Placement
    warm: Placement | None
    previous: Placement | None
    unseen: Placement | None


class SegmentLookup:
    """Routes by a membership's views. Thread-safe.

    `available` returns whether users' requests may go to a member, by its id; `unsure` returns
    whether other members may hold its blocks (`PoolHealth.trusted` and `unsure`). Both are fast.
    `stripe`: the most members over which a segment is striped.
    """

    def __init__(
        self,
        membership: Membership,
        available: Callable[[str], bool],
        unsure: Callable[[str], bool] = lambda _: False,
        stripe: int = 1,
    ) -> None:
        self._membership = membership
        self._available = available
        self._unsure = unsure
        self.stripe = stripe
        self._placements = self._placements_of(membership.views(), None)

    def lanes(self) -> int:
        """Return over how many members a segment is striped now; 1: it is on one member."""
        return self._refresh().current.lanes

    def route(self, segment_id: bytes, copies: int = 1, block: int = 0) -> Route:
        """Return the members for a block of a segment now; `block` is its number in the segment.

        All blocks of a lane have one route.
        """
        known = self._refresh()
        ranked = known.current.rank_block(segment_id, block)
        write = self._first(ranked, copies)
        owners = sum(member in ranked[:copies] for member in write)
        read = dict.fromkeys(write)
        if any(self._unsure(member.id) for member in ranked[:copies]):
            read |= dict.fromkeys(self._first(ranked, copies + 1))
        if known.warm is not None:
            read |= dict.fromkeys(self._first(known.warm.rank_block(segment_id, block), copies))
        for placement, count in ((known.previous, copies), (known.unseen, copies + UNSEEN_COPIES)):
            if placement is not None:
                # Ask a member at its current address. A member that is no longer listed may still
                # run, so ask it at its last address; if it is dead, its breaker opens soon.
                ranked = placement.rank_block(segment_id, block)
                present = (known.by_id.get(member.id, member) for member in ranked)
                read |= dict.fromkeys(self._first(present, count))
        return Route(write, tuple(read), owners)

    def owners(self, segment_id: bytes) -> tuple[Member, ...]:
        """Return the owners of a segment's lanes, whether they are available or not."""
        return self._refresh().current.owners(segment_id)

    def is_striped(self) -> bool:
        """Return whether segments are or were striped: several members may hold their blocks."""
        return self.stripe > 1 and len(self._refresh().current.members) > 1

    def holders(self, segment_id: bytes) -> tuple[Member, ...]:
        """Return all available members that may hold blocks of a striped segment, of any lane.

        When the number of members changes, blocks stay with members that have other lanes then.
        """
        known, found = self._refresh(), dict[Member, None]()
        for placement in (known.current, known.warm, known.previous, known.unseen):
            if placement is not None:
                holders = placement.holders(segment_id)
                if any(self._unsure(member.id) for member in holders):
                    holders = placement.rank(segment_id)
                present = (known.by_id.get(member.id, member) for member in holders)
                found |= dict.fromkeys(m for m in present if self._available(m.id))
        return tuple(found)

    def placement(self) -> Placement:
        """Return the current placement."""
        return self._refresh().current

    def members(self) -> tuple[Member, ...]:
        """Return all members that a route may name now."""
        known = self._refresh()
        views = [placed.view for placed in known.views if placed is not None]
        return tuple({m.id: m for view in reversed(views) for m in view.members}.values())

    def shares(self) -> dict[str, float]:
        """Return the share of blocks that each member should have now; they sum up to 1."""
        return dict(self._refresh().current.shares)

    def _refresh(self) -> _Placements:
        views = self._membership.views()
        known = self._placements
        if views != known.views:
            # Threads may race to here; each learns the same and the last to store it wins.
            known = self._placements = self._placements_of(views, known)
        return known

    def _first(self, members: Iterable[Member], count: int) -> tuple[Member, ...]:
        available = (member for member in members if self._available(member.id))
        return tuple(islice(available, count))

    def _placements_of(self, views: PoolViews, known: _Placements | None) -> _Placements:
        """Build placements for views, keeping those whose rankings still hold."""
        current = self._placement(views.current, known)
        members = views.current.view.members
        warm = Placement(members, stripe=self.stripe) if views.current.shares else None
        previous = views.previous and self._placement(views.previous, known)
        unseen = views.unseen and self._placement(views.unseen, known)
        by_id = {member.id: member for member in members}
        return _Placements(views, by_id, current, warm, previous, unseen)

    def _placement(self, weighted: WeightedView, known: _Placements | None) -> Placement:
        if known is not None:
            placements = (known.current, known.previous, known.unseen)
            for before, placement in zip(known.views, placements, strict=True):
                if placement is not None and weighted == before:
                    return placement
        return Placement(weighted.view.members, weighted.shares, self.stripe)
