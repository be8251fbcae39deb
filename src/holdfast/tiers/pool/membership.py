"""Who is in the pool: quick to believe good news, slow to believe bad, never empty again.

A source reports whole lists; `Membership` turns them into views. The rules:

    missing from the list            stays in the view for `dead_after_s`, then it is out
    out, and in the list again       back once it has been there for `dead_after_s` on end
    draining                         out of placement at once; back as above
    new                              in at once, its share ramping up over `ramp_s`
    an empty list, or no list        the last view stays, however long

So a member that comes and goes every second changes nothing, and a membership service that is
gone costs nothing. After a change the view before it stays known for `overlap_s`: who misses asks
the owner of old. Only state changes here; sources bring their own threads and I/O.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.tiers.pool.members import Member, State, View
from holdfast.tiers.pool.placement import ramp_share


class MembershipSource(Protocol):
    """Where lists of members come from. `holdfast.testing.membership_contract` tests a source."""

    def watch(self, told: Callable[[Sequence[Member]], None]) -> None:
        """Call `told` with the whole list soon, and again whenever it changes, until `close`.

        Returns at once; `told` is called from one thread of the source's own. While the list can
        not be read, or makes no sense, nothing is told. Called once.
        """
        ...

    def trouble(self) -> str:
        """Return what is wrong with the source now, in words; empty while all is well."""
        ...

    def close(self) -> None:
        """Stop; when it returns, `told` is not called any more."""
        ...


class MembershipOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take, in seconds; the module's text says what each is for.

    A view that lived less than `fleeting_s` was hardly written under: the one before it is asked.
    """

    dead_after_s: float = 15.0
    overlap_s: float = 600.0
    ramp_s: float = 300.0
    fleeting_s: float = 5.0


class Placed(NamedTuple):
    """A view, and the share of its weight that each member still warming up has in it."""

    view: View
    shares: Mapping[str, float]


class Views(NamedTuple):
    """The view to go by, and the one before it while that is worth asking."""

    current: Placed
    previous: Placed | None


class _Sign(NamedTuple):
    """How a member was last seen (None: missing), and since when it has been seen like that."""

    member: Member | None
    since_s: float

    def same_kind(self, member: Member | None) -> bool:
        if member is None or self.member is None:
            return member is self.member
        return member.takes_segments == self.member.takes_segments


class Membership:
    """The views of one process. Any thread may call any method; none of them waits."""

    def __init__(self, clock: Clock, options: MembershipOptions | None = None) -> None:
        self._clock = clock
        self._options = options or MembershipOptions()
        self._lock = threading.Lock()
        self._signs: dict[str, _Sign] = {}
        self._out: set[str] = set()
        self._joined_s: dict[str, float] = {}
        self._view = View.of(0, ())
        self._previous: Placed | None = None
        self._changed_s = -math.inf
        self._due_s = math.inf
        self.empty_lists = 0

    def observe(self, members: Iterable[Member]) -> None:
        """Take note of a whole list from a source; ids must be distinct."""
        alive = {member.id: member for member in members if member.state is not State.DEAD}
        with self._lock:
            if not alive:
                self.empty_lists += 1
                return
            now_s = self._clock.now()
            self._settle(now_s)
            for member_id in self._signs.keys() | alive.keys():
                self._note(member_id, alive.get(member_id), now_s)
            self._settle(now_s)

    def views(self) -> Views:
        """Return the views as of now."""
        with self._lock:
            now_s = self._clock.now()
            if now_s >= self._due_s:
                self._settle(now_s)
            return Views(Placed(self._view, self._shares(now_s)), self._previous)

    def _note(self, member_id: str, member: Member | None, now_s: float) -> None:
        sign = self._signs.get(member_id)
        kept = sign is not None and sign.same_kind(member)
        since_s = sign.since_s if sign is not None and kept else now_s
        self._signs[member_id] = _Sign(member, since_s)

    def _settle(self, now_s: float) -> None:
        """Let what is due by now happen, and work out when the next thing is."""
        held = {member.id: member for member in self._view.members}
        due_s = [math.inf]
        missing_last = sorted(self._signs.items(), key=lambda item: item[1].member is None)
        for member_id, sign in missing_last:
            due_s.append(self._judge(held, member_id, sign, now_s))
        self._turn(held, now_s)
        if self._previous is not None:
            if now_s >= self._changed_s + self._options.overlap_s:
                self._previous = None
            due_s.append(self._changed_s + self._options.overlap_s)
        self._due_s = min(at_s for at_s in due_s if at_s > now_s)

    def _judge(self, held: dict[str, Member], member_id: str, sign: _Sign, now_s: float) -> float:
        """Move one member in or out of `held`; return when to look at it again."""
        steady_s = sign.since_s + self._options.dead_after_s
        there = held.get(member_id)
        if sign.member is None:
            # The last one stays, like a whole view whose source says nothing: better than nobody.
            if there is not None and (now_s < steady_s or len(held) == 1):
                return steady_s
            if there is not None:
                del held[member_id]
                self._out.add(member_id)
            forget_s = steady_s + self._options.overlap_s
            if now_s >= forget_s:
                self._forget(member_id)
            return forget_s
        wanted = sign.member.takes_segments
        was_out = member_id in self._out or (there is not None and not there.takes_segments)
        if wanted and was_out and now_s < steady_s:
            return steady_s
        if wanted:
            self._out.discard(member_id)
        if wanted and there is None and self._view.epoch:
            self._joined_s[member_id] = now_s
        if wanted and there is None and sign.member.state is State.JOINING:
            self._joined_s[member_id] = now_s
        if there is not None or member_id not in self._out:
            held[member_id] = sign.member
        return math.inf

    def _turn(self, held: Mapping[str, Member], now_s: float) -> None:
        """Make `held` the view; a new epoch if segments may move."""
        view = View.of(self._view.epoch, held.values())
        if view.members == self._view.members:
            return
        if view.digest != self._view.digest or not self._view.epoch:
            fleeting = now_s - self._changed_s < self._options.fleeting_s
            if self._view.epoch and not (fleeting and self._previous is not None):
                shares = self._shares(now_s)
                known = {m.id: shares[m.id] for m in self._view.members if m.id in shares}
                self._previous = Placed(self._view, known)
            self._changed_s = now_s
            view = View(view.epoch + 1, view.members, view.digest)
        self._view = view

    def _shares(self, now_s: float) -> dict[str, float]:
        """Return the shares of those still warming up, and forget about those that are done."""
        if not self._joined_s:
            return {}
        ramp_s = self._options.ramp_s
        shares = {
            member_id: ramp_share(now_s - joined_s, ramp_s)
            for member_id, joined_s in self._joined_s.items()
        }
        for member_id, joined_s in list(self._joined_s.items()):
            if now_s - joined_s >= ramp_s:
                del self._joined_s[member_id]
        return {member_id: share for member_id, share in shares.items() if share < 1.0}

    def _forget(self, member_id: str) -> None:
        self._signs.pop(member_id, None)
        self._out.discard(member_id)
        self._joined_s.pop(member_id, None)
