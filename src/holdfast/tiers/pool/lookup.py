"""Whom to ask for a segment and where to write it, while members come, go and fail.

    write to    the first `copies` members of the ranking that are available: the owner, or the
                next-ranked in its stead (the gutter); nothing is re-placed for a failure
    read from   the same, then whom others may have written to: the next in rank while one is out
                of order or has just been, the owner by full weights while a member is warming up
                (who started later sees it as warm), those of the view before this one, and, in a
                process that started lately, the next `UNSEEN_COPIES` in rank of all members

A member that holds a block serves it whatever the epoch, so reading by an old view is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.membership.members import Member
from holdfast.membership.membership import Membership, PlacedMember, PoolViews
from holdfast.membership.placement import Placement

UNSEEN_COPIES = 2
"""Further members that a freshly started process asks on a miss: so many members may have joined
shortly before it started, without a block being missed."""


class Route(NamedTuple):
    """Members for one segment, best first, and the epoch and digest they were found under.

    `write` is shorter than asked where too few are available; its first `owners` are whom the
    ranking names, behind them are stand-ins, who hold only what was written lately. `read` begins
    with `write` and holds nobody twice.
    """

    write: tuple[Member, ...]
    read: tuple[Member, ...]
    epoch: int
    digest: int
    owners: int


class _Known(NamedTuple):
    views: PoolViews
    current: Placement
    warm: Placement | None
    previous: Placement | None
    unseen: Placement | None


class SegmentLookup:
    """Routes by a membership's views; any thread.

    `available` says whether a member, by id, should be asked at all just now; it must be quick
    and change nothing (`PoolHealth.trusted`). `unsure`: whether others may hold what is its.
    """

    def __init__(
        self,
        membership: Membership,
        available: Callable[[str], bool],
        unsure: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._membership = membership
        self._available = available
        self._unsure = unsure
        self._known = _learn(membership.views(), None)

    def route(self, segment_id: bytes, copies: int = 1) -> Route:
        """Return whom to ask and where to write, as of now."""
        known = self._refresh()
        ranked = known.current.rank(segment_id)
        write = self._first(ranked, copies)
        owners = sum(member in ranked[:copies] for member in write)
        read = dict.fromkeys(write)
        if any(self._unsure(member.id) for member in ranked[:copies]):
            read |= dict.fromkeys(self._first(ranked, copies + 1))
        if known.warm is not None:
            read |= dict.fromkeys(self._first(known.warm.rank(segment_id), copies))
        if known.previous is not None:
            current = {member.id: member for member in known.views.current.view.members}
            # An old owner is asked where it lives now. One that is out may only have been taken
            # off the list, so it is asked where it lived; if it is dead its breaker soon says so.
            ranked = known.previous.rank(segment_id)
            read |= dict.fromkeys(
                self._first((current.get(member.id, member) for member in ranked), copies)
            )
        if known.unseen is not None:
            current = {member.id: member for member in known.views.current.view.members}
            ranked = known.unseen.rank(segment_id)
            read |= dict.fromkeys(
                self._first((current[member.id] for member in ranked), copies + UNSEEN_COPIES)
            )
        view = known.views.current.view
        return Route(write, tuple(read), view.epoch, view.digest, owners)

    def placement(self) -> Placement:
        """Return who gets which segment now."""
        return self._refresh().current

    def members(self) -> tuple[Member, ...]:
        """Return everybody whom a route may name now: whom to keep connections and health for."""
        known = self._refresh()
        views = [placed.view for placed in known.views if placed is not None]
        return tuple({m.id: m for view in reversed(views) for m in view.members}.values())

    def shares(self) -> dict[str, float]:
        """Return the share of segments that each member should have now; they sum up to 1."""
        weights = self._refresh().current.weights()
        total = sum(weights.values())
        return {member_id: weight / total for member_id, weight in weights.items()}

    def _refresh(self) -> _Known:
        views = self._membership.views()
        known = self._known
        if views != known.views:
            # Threads may race to here; each learns the same and the last to store it wins.
            known = self._known = _learn(views, known)
        return known

    def _first(self, members: Iterable[Member], count: int) -> tuple[Member, ...]:
        found: list[Member] = []
        for member in members:
            if len(found) == count:
                break
            if self._available(member.id):
                found.append(member)
        return tuple(found)


def _learn(views: PoolViews, known: _Known | None) -> _Known:
    """Build placements for views, keeping those whose rankings still hold."""
    current = _placement(views.current, known)
    warm = Placement(views.current.view.members) if views.current.shares else None
    previous = views.previous and _placement(views.previous, known)
    unseen = views.unseen and _placement(views.unseen, known)
    return _Known(views, current, warm, previous, unseen)


def _placement(placed: PlacedMember, known: _Known | None) -> Placement:
    if known is not None:
        if placed == known.views.current:
            return known.current
        if known.previous is not None and placed == known.views.previous:
            return known.previous
        if known.unseen is not None and placed == known.views.unseen:
            return known.unseen
    return Placement(placed.view.members, placed.shares)
