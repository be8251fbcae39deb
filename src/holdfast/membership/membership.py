"""Views of a pool's members from the lists of a source, with flap damping.

A source reports whole lists; `Membership` turns them into views. The rules:

    missing from the list            stays in the view for `dead_after_s`, then it is removed
    removed, and listed again        returns after `dead_after_s` of uninterrupted presence
    draining                         out of placement at once; returns as above
    new                              in the view at once; its share grows over `ramp_s`
    an empty list, or no list        the last view stays without limit

So a member that appears and disappears every second changes nothing, nor does the loss of the
membership service. After a change the previous view is kept for `overlap_s`: a lookup that misses
asks the previous owner. A process that has just started has seen no change. On a miss in its first
`unseen_s` it also asks the next members in rank and draining ones (`PoolViews.unseen`), because a
segment that a joining member took over belonged to the next member in rank. This module has no
threads and no I/O; sources do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.membership.members import Member, MemberState, PoolView
from holdfast.membership.placement import ramp_share


class MembershipSource(Protocol):
    """A source of member lists; `holdfast.testing.membership_contract` is its contract test."""

    def watch(self, on_members: Callable[[Sequence[Member]], None]) -> None:
        """Call `on_members` with the whole list soon, and again after each change, until `close`.

        Returns at once; `on_members` is called from one thread of the source. A list that cannot be
        read, or is invalid, is not reported. Called once.
        """
        ...

    def trouble(self) -> str:
        """Return the source's current error as text; empty if it works."""
        ...

    def close(self) -> None:
        """Stop; `on_members` is not called after this returns."""
        ...


class MembershipOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds; the module's docstring explains them.

    A view that lasted less than `transient_s` has few blocks written under it, so the view before
    it stays the previous one. For `unseen_s` after its first list a process also asks members where
    earlier changes, which it did not see, may have left blocks.
    """

    dead_after_s: float = 15.0
    overlap_s: float = 600.0
    ramp_s: float = 300.0
    transient_s: float = 5.0
    unseen_s: float = 600.0


class WeightedView(NamedTuple):
    """A view, and the current share of its weight of each member that is still warming up."""

    view: PoolView
    shares: Mapping[str, float]


class PoolViews(NamedTuple):
    """The current view, and the previous one for `overlap_s` after a change.

    `unseen` is set while this process has watched the list for less than `unseen_s`. It is the
    current view with full weights and draining members included: the placement under which other
    nodes may have written before the last changes, as far as the list can tell.
    """

    current: WeightedView
    previous: WeightedView | None
    unseen: WeightedView | None = None


class _Observation(NamedTuple):
    """The last listing of a member (None: missing), and the time since which it is unchanged."""

    member: Member | None
    since_s: float

    def same_kind(self, member: Member | None) -> bool:
        if member is None or self.member is None:
            return member is self.member
        return member.takes_segments == self.member.takes_segments


class Membership:
    """The views of one process. Thread-safe; no method blocks."""

    def __init__(self, clock: Clock, options: MembershipOptions | None = None) -> None:
        self._clock = clock
        self._options = options or MembershipOptions()
        self._lock = threading.Lock()
        self._observations: dict[str, _Observation] = {}
        self._removed: set[str] = set()
        self._joined_s: dict[str, float] = {}
        self._view = PoolView.of(0, ())
        self._previous: WeightedView | None = None
        self._changed_s = -math.inf
        self._due_s = math.inf
        self._watched_s = math.inf
        self._unseen: WeightedView | None = None

    def observe(self, members: Iterable[Member]) -> None:
        """Apply a whole list from a source; ids must be distinct."""
        alive = {member.id: member for member in members if member.state is not MemberState.DEAD}
        with self._lock:
            if not alive:
                return
            now_s = self._clock.now()
            self._watched_s = min(self._watched_s, now_s)
            self._update(now_s)
            for member_id in self._observations.keys() | alive.keys():
                member, last = alive.get(member_id), self._observations.get(member_id)
                since_s = last.since_s if last is not None and last.same_kind(member) else now_s
                self._observations[member_id] = _Observation(member, since_s)
            self._update(now_s)

    def views(self) -> PoolViews:
        """Return the current views."""
        with self._lock:
            now_s = self._clock.now()
            if now_s >= self._due_s:
                self._update(now_s)
            current = WeightedView(self._view, self._shares(now_s))
            has_watched = now_s >= self._watched_s + self._options.unseen_s
            return PoolViews(current, self._previous, None if has_watched else self._unseen)

    def _update(self, now_s: float) -> None:
        """Make all transitions that are due, and compute the time of the next one."""
        members = {member.id: member for member in self._view.members}
        due_s = [math.inf]
        missing_last = sorted(self._observations.items(), key=lambda item: item[1].member is None)
        for member_id, observation in missing_last:
            due_s.append(self._update_member(members, member_id, observation, now_s))
        self._replace_view(members, now_s)
        if self._previous is not None:
            if now_s >= self._changed_s + self._options.overlap_s:
                self._previous = None
            due_s.append(self._changed_s + self._options.overlap_s)
        self._due_s = min(at_s for at_s in due_s if at_s > now_s)

    def _update_member(
        self, members: dict[str, Member], member_id: str, observation: _Observation, now_s: float
    ) -> float:
        """Add a member to `members` or remove it; return the time of its next transition."""
        stable_s = observation.since_s + self._options.dead_after_s
        current, listed = members.get(member_id), observation.member
        if listed is None:
            # The last member stays, because an empty view can serve nothing.
            if current is not None and (now_s < stable_s or len(members) == 1):
                return stable_s
            if current is not None:
                del members[member_id]
                self._removed.add(member_id)
            forget_s = stable_s + self._options.overlap_s
            if now_s >= forget_s:
                self._observations.pop(member_id, None)
                self._removed.discard(member_id)
                self._joined_s.pop(member_id, None)
            return forget_s
        if listed.takes_segments:
            returns = current is not None and not current.takes_segments
            if (returns or member_id in self._removed) and now_s < stable_s:
                return stable_s
            self._removed.discard(member_id)
            joins = bool(self._view.epoch) or listed.state is MemberState.JOINING
            if current is None and joins:
                self._joined_s[member_id] = now_s
        if current is not None or member_id not in self._removed:
            members[member_id] = listed
        return math.inf

    def _replace_view(self, members: Mapping[str, Member], now_s: float) -> None:
        """Make `members` the current view, in a new epoch if segments may move."""
        view = PoolView.of(self._view.epoch, members.values())
        if view.members == self._view.members:
            return
        if view.digest != self._view.digest or not self._view.epoch:
            transient = now_s - self._changed_s < self._options.transient_s
            if self._view.epoch and not (transient and self._previous is not None):
                shares = self._shares(now_s)
                known = {m.id: shares[m.id] for m in self._view.members if m.id in shares}
                self._previous = WeightedView(self._view, known)
            self._changed_s = now_s
            view = PoolView(view.epoch + 1, view.members, view.digest)
        self._view = view
        serving = (msgspec.structs.replace(m, state=MemberState.SERVING) for m in view.members)
        self._unseen = WeightedView(PoolView.of(view.epoch, serving), {})

    def _shares(self, now_s: float) -> dict[str, float]:
        """Return the shares of members that are still warming up, and drop the finished ones."""
        if not self._joined_s:
            return {}
        ramp_s = self._options.ramp_s
        self._joined_s = {m: at_s for m, at_s in self._joined_s.items() if now_s - at_s < ramp_s}
        shares = {m: ramp_share(now_s - at_s, ramp_s) for m, at_s in self._joined_s.items()}
        return {member_id: share for member_id, share in shares.items() if share < 1.0}
