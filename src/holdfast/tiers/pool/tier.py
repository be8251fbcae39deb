"""The pool tier: records on other nodes, placed by segment, asked for within a deadline.

    write   each record to the owner of its segment (and to a second member if it is hot)
    read    from the owner, or whoever else may hold it: next in rank, or the owner before a change
    held    which leading blocks of a chain are there, one question per member

A member that is slow, dead or late costs a bounded time and then nothing: its breaker opens, its
segments go to the next in rank, and what it held is recomputed.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import msgspec

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.clock import Clock, SystemClock
from holdfast.errors import Outcome
from holdfast.limits import MIB, SEGMENT_BLOCKS
from holdfast.tiers.base import Get, Place, Put, Reserved, Survivor, Usage, segment_place
from holdfast.tiers.pool.evidence import Kind
from holdfast.tiers.pool.health import HealthOptions, PoolHealth
from holdfast.tiers.pool.hot import HotSegments
from holdfast.tiers.pool.lookup import Lookup, Route
from holdfast.tiers.pool.members import Member
from holdfast.tiers.pool.membership import Membership, MembershipOptions, MembershipSource
from holdfast.tiers.pool.moves import Losses, Strays
from holdfast.tiers.pool.part import Part, names_of, parts_of, place_of, segment_of
from holdfast.tiers.pool.race import RACED_BYTES, Races
from holdfast.tiers.pool.reach import Far, Reach
from holdfast.tiers.pool.trial import Trials
from holdfast.workers import workers

HOT_COPIES = 2
"""Copies of a segment that many ask for."""

ASKED_BYTES = 1 * MIB
"""From here on a member is asked what it has of a batch before the batch is sent."""

_log = logging.getLogger(__name__)


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How long a call may take, in seconds, and the options of what judges the members.

    `segment_blocks` of a chain are placed together: the same for all who use the pool.
    """

    deadline_s: float = 2.0
    ask_s: float = 0.25
    segment_blocks: int = SEGMENT_BLOCKS
    threads: int = 16
    membership: MembershipOptions = MembershipOptions()
    health: HealthOptions = HealthOptions()


class PoolTier:
    """See `holdfast.tiers.base.Shared`. Owns the source and the connections it opens."""

    def __init__(
        self,
        source: MembershipSource,
        connect: Callable[[Member], Far],
        options: PoolOptions | None = None,
        clock: Clock | None = None,
        name: str = "pool",
    ) -> None:
        self.name = name
        self.options = options or PoolOptions()
        clock = clock or SystemClock()
        self.membership = Membership(clock, self.options.membership)
        chance = random.Random()  # noqa: S311  # draws who to ask, keeps no secret
        self.health = PoolHealth(clock, self.options.health, chance)
        self.reach = Reach(connect, self.health)
        self.lookup = Lookup(self.membership, self.health.trusted, self.health.unsure)
        self.strays = Strays(clock)
        self._losses = Losses(self.lookup.placement())
        self._trials = Trials(self.lookup, self.health, self.reach, self.options.ask_s, self._keep)
        self.hot = HotSegments(clock)
        self._source = source
        self._lock = threading.Lock()
        self._threads = workers(self.options.threads, f"holdfast-{name}")
        self.races = Races(self.health, f"holdfast-{name}-race")
        self._usage = [0, 0]
        self._closed = False
        source.watch(self._told)
        self._trials.start()

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Nothing is reserved: the far side finds room when records come."""
        return Reserved([Place(0)] * len(sizes), [])

    def known(self, batch: Sequence[Put]) -> list[bool]:
        """Ask whom each record belongs to: whoever computed the same wrote it before us."""
        found = [False] * len(batch)
        parts = parts_of([place_of(put.record) for put in batch], self.options.ask_s)
        self._each(parts, lambda part: self._find(part, batch, found))
        return found

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Send each record to whom its segment belongs; OK once one copy is stored."""
        outcomes = [Outcome.GONE] * len(batch)
        parts = parts_of([place_of(put.record) for put in batch], self.options.deadline_s)
        self._each(parts, lambda part: self._write(part, batch, outcomes))
        return outcomes

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Receive records straight into their buffers, segment by segment, abreast."""
        outcomes = [Outcome.GONE if self._closed else Outcome.MISS] * len(batch)
        parts = parts_of([get.place for get in batch], self.options.deadline_s)
        self._each(parts, lambda part: self._read(part, batch, outcomes))
        return outcomes

    def free(self, places: Sequence[Place]) -> None:
        """Nothing to forget: others may want them."""

    def survivors(self) -> Iterator[Survivor]:
        """Yield nothing: whoever needs a block asks for it."""
        return iter(())

    def held(
        self, world: World, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> int:
        """Ask the members about blocks `start` on; return how many are held in a row."""
        found = bytearray(len(keys))
        parts, until = [], time.monotonic() + min(self.options.ask_s, within_s)
        size = self.options.segment_blocks
        for head in range(start - start % size, len(keys), size):
            place = segment_place(keys[head][:SEGMENT_BYTES])
            stop = min(head + size, len(keys))
            parts.append(Part(segment_of(place), list(range(max(head, start), stop)), until))
        self._each(parts, lambda part: self._ask(part, world, keys, found))
        missing = found.find(0, start)
        return (missing if missing >= 0 else len(keys)) - start

    def condemn(self, batch: Sequence[Get]) -> None:
        """Have everybody who may have served a record delete it."""
        parts = parts_of([get.place for get in batch], self.options.ask_s)
        self._each(parts, lambda part: self._condemn(part, batch))

    def strayed(self, keys: Sequence[bytes], record_bytes: int) -> set[bytes]:
        """Return which of these came from an owner of old, or from who stood in for the owner."""
        return self.strays.take(keys, record_bytes)

    def lost(self) -> Callable[[Place], bool] | None:
        """Return which places belonged to members that left, or have been down for long."""
        down = self.health.down(self.options.membership.dead_after_s)
        return self._losses.since(self.lookup.placement(), down)

    def reachable(self) -> bool:
        """Return whether any member is one that users' requests go to."""
        return any(self.health.trusted(member.id) for member in self.lookup.members())

    def describe(self) -> dict[str, Any]:
        """Return epoch, trouble with the source, and for each member what is known and asked."""
        if self._closed:
            return {"tier": self.name, "members": []}
        view = self.membership.views().current.view
        shares = self.lookup.shares()
        reports = {report.target: msgspec.to_builtins(report) for report in self.health.reports()}
        fills = self._threads.map(self._fill, view.members)
        members = [
            {
                **msgspec.to_builtins(member),
                **reports.get(member.id, {}),
                "share": shares.get(member.id, 0.0),
                "tiers": fill,
            }
            for member, fill in zip(view.members, fills, strict=True)
        ]
        return {
            "tier": self.name,
            "epoch": view.epoch,
            "digest": f"{view.digest:016x}",
            "trouble": self._source.trouble(),
            "hedges": self.races.hedging.hedges,
            "moved": self.strays.moved,
            "members": members,
        }

    def usage(self) -> Usage:
        """Return what went over the wire; what the members hold is theirs to say."""
        read_bytes, written_bytes = self._usage
        return Usage(0, 0, 0, read_bytes, written_bytes, self.reach.failures)

    def close(self) -> None:
        """Stop watching, end the calls, close the connections."""
        self._closed = True
        self._source.close()
        self._trials.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.races.close()
        self.reach.close()

    def _told(self, members: Sequence[Member]) -> None:
        self.membership.observe(members)
        self._keep()

    def _keep(self) -> None:
        """Know whom a route may name now; views change with time alone, too.

        Whom the list leaves out is asked for what it holds as long as routes say.
        """
        listed = [member.id for member in self.membership.views().current.view.members]
        known = [member.id for member in self.lookup.members()]
        self.health.keep(known, listed)
        self.reach.keep(known)

    def _fill(self, member: Member) -> list[dict[str, Any]]:
        """Ask a member how full its tiers are; nothing where it does not say."""
        told = self.reach.tell(
            self.reach.begin(member, 0, self.membership.views().current.view.digest),
            lambda far: far.stats(self.options.ask_s),
        )
        return [] if told is None else list(told[0].get("tiers", []))

    def _each(self, parts: Sequence[Part], act: Callable[[Part], None]) -> None:
        """Act on every part, abreast; calls are bounded by their own deadlines."""
        if self._closed or len(parts) == 1:
            for part in parts if not self._closed else ():
                act(part)
            return
        begun = [(part, self._threads.submit(act, part)) for part in parts]
        for part, done in begun:
            if not wait([done], part.left_s).done:
                done.cancel()  # every thread is busy, with calls that may take longer than this may
        acted = [done for _, done in begun if not done.cancelled()]
        wait(acted)  # whatever became of one: no other uses the caller's memory from here on
        for done in acted:
            done.result()

    def _find(self, part: Part, batch: Sequence[Put], found: list[bool]) -> None:
        """Find out what all who are to have a part have of it, where that is worth a question."""
        records = [batch[index].record for index in part.indices]
        world, keys = names_of(records)
        if world is None or sum(map(len, records)) < ASKED_BYTES:
            return
        route = self._route(part)
        answers = [self._exist(one, part, world, keys, route.digest) for one in route.write]
        for index, *there in zip(part.indices, *answers, strict=True):
            found[index] = bool(there) and all(there)

    def _route(self, part: Part) -> Route:
        """Return whom to write a part to."""
        return self.lookup.route(part.segment, HOT_COPIES if self.hot.is_hot(part.segment) else 1)

    def _write(self, part: Part, batch: Sequence[Put], outcomes: list[Outcome]) -> None:
        records = [batch[index].record for index in part.indices]
        route = self._route(part)
        for member in route.write:
            if not part.left_s:
                break
            stored = self._send(route.digest, member, part, records)
            for index, outcome in zip(part.indices, stored, strict=False):
                if outcomes[index] is not Outcome.OK:
                    outcomes[index] = _told(outcome)
                self._count(1, len(batch[index].record) * (outcome is Outcome.OK))

    def _send(
        self, digest: int, member: Member, part: Part, records: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        """Put records to one member; return what became of each, nothing where it is not said."""
        call = self.reach.begin(member, sum(map(len, records)), digest, Kind.WRITE)
        heard = self.reach.heard(call)
        return self.reach.tell(call, lambda far: far.put(records, part.left_s, heard)) or ()

    def _read(self, part: Part, batch: Sequence[Get], outcomes: list[Outcome]) -> None:
        """Ask one member after the other for what is still missing of a segment.

        What came from elsewhere than its owner strayed, and so did what one of two owners has not:
        it was written before many asked for it.
        """
        # One fetch reads a segment in many batches. Its first block is in one of them.
        begins = any(_is_first(batch[index]) for index in part.indices)
        hot = self.hot.hit(part.segment) if begins else self.hot.is_hot(part.segment)
        copies = HOT_COPIES if hot else 1
        route = self.lookup.route(part.segment, copies)
        left = list(part.indices)
        members, asked = self._order(route), set[Member]()
        nbytes = sum(len(batch[index].into) for index in left)
        receive, missed = partial(self._receive, route.digest), False
        if copies > 1 and len(members) > 1 and nbytes <= RACED_BYTES:
            left, asked = self.races.run(members, part, batch, outcomes, receive)
            missed = len(asked) > 1 or bool(asked and left)
            if missed:
                self._note_strays(batch, part.indices[: len(part.indices) - len(left)])
        for member in members:
            if left and member not in asked:
                before, owns = left, member in route.write
                left = receive(member, part._replace(indices=left), batch, outcomes)
                if missed or not owns:
                    self._note_strays(batch, before[: len(before) - len(left)])
                missed |= owns and bool(left) and outcomes[left[0]] is Outcome.MISS
        done = sum(len(batch[i].into) for i in part.indices if outcomes[i] is Outcome.OK)
        self._count(0, done)

    def _note_strays(self, batch: Sequence[Get], came: Sequence[int]) -> None:
        self.strays.found([batch[index].key for index in came])

    def _order(self, route: Route) -> list[Member]:
        """Put the less busy of two owners first; a stand-in may not have the copy."""
        if route.owners < HOT_COPIES:
            return list(route.read)
        first = self.health.choose([member.id for member in route.write[: route.owners]])
        return sorted(route.read, key=lambda member: member.id != first)

    def _receive(
        self,
        digest: int,
        member: Member,
        part: Part,
        batch: Sequence[Get],
        outcomes: list[Outcome],
    ) -> list[int]:
        """Receive the leading run of a part from one member; return what is left then."""
        left = part.indices
        world = batch[left[0]].world
        wanted = [batch[index] for index in left]
        if world is None or not part.left_s:
            return left
        keys, into = [get.key for get in wanted], [get.into for get in wanted]
        call = self.reach.begin(member, sum(map(len, into)), digest, Kind.READ)
        heard = self.reach.heard(call)
        got = self.reach.tell(call, lambda far: far.get(world, keys, into, part.left_s, heard))
        if got is None or got.outcome in (Outcome.GONE, Outcome.LATE, Outcome.UNSENT):
            failed = Outcome.GONE if got is None else _told(got.outcome)
            for index in left[got.blocks if got else 0 :]:
                outcomes[index] = failed
        if got is None:
            return left
        for index in left[: got.blocks]:
            outcomes[index] = Outcome.OK
        if got.blocks < len(left) and outcomes[left[got.blocks]] is not Outcome.OK:
            outcomes[left[got.blocks]] = _kept(_told(got.outcome))
        return left[got.blocks :]

    def _ask(self, part: Part, world: World, keys: Sequence[bytes], found: bytearray) -> None:
        wanted = [keys[index] for index in part.indices]
        route = self.lookup.route(part.segment)
        for member in route.read:
            held = self._exist(member, part, world, wanted, route.digest)
            for index, there in zip(part.indices, held, strict=True):
                found[index] |= there
            if all(held):
                return

    def _exist(
        self, member: Member, part: Part, world: World, keys: Sequence[bytes], digest: int
    ) -> bytes:
        """Ask a member, if there is time, which it has: a byte a block, 0 where it does not say."""
        call = self.reach.begin(member, 0, digest) if part.left_s else None
        held = self.reach.tell(call, lambda far: far.exist(world, keys, part.left_s))
        return held.held if held else bytes(len(keys))

    def _condemn(self, part: Part, batch: Sequence[Get]) -> None:
        world, keys = batch[part.indices[0]].world, [batch[index].key for index in part.indices]
        if world is None:
            return
        route = self.lookup.route(part.segment, HOT_COPIES)
        for member in route.read:
            call = self.reach.begin(member, 0, route.digest) if part.left_s else None
            self.reach.tell(call, lambda far: far.delete(world, keys, part.left_s))

    def _count(self, which: int, number: int) -> None:
        with self._lock:
            self._usage[which] += number


def _is_first(get: Get) -> bool:
    """Whether a block is the first of its segment, which is named for it."""
    return segment_place(get.key[:SEGMENT_BYTES]) == get.place


def _told(outcome: Outcome) -> Outcome:
    """Return what the store hears: not sent in time is late."""
    return Outcome.LATE if outcome is Outcome.UNSENT else outcome


def _kept(outcome: Outcome) -> Outcome:
    """Return the outcome of a block that did not come: never OK."""
    return Outcome.MISS if outcome is Outcome.OK else outcome
