"""The pool tier: records on other nodes, placed by segment, requested within a deadline.

    write   each record to its owner (and to a second member if its segment is hot); then a parity
            record of each row of blocks
    read    from the owner, or from members that may hold it instead: the next in rank, or the
            owner before a change of members; else rebuilt from the other blocks of its row
    held    the number of leading blocks of a chain, with one question per member

With few members a segment has one owner. With more it is striped over several, each of which owns a
lane of it; `striped_reads` and `striped_lookup` combine the lanes.

A slow, dead or late member costs a bounded time once. Then its breaker opens, its segments go to
the next member in rank, and its blocks are recomputed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from holdfast.blocks.envelope import header_of_record, read_header, record_length
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.clock import Clock, SystemClock
from holdfast.errors import Outcome
from holdfast.limits import MIB, SEGMENT_BLOCKS, STRIPE_TARGETS
from holdfast.membership.members import Member
from holdfast.membership.membership import Membership, MembershipOptions, MembershipSource
from holdfast.status import MemberStatus
from holdfast.tiers.base import (
    AnsweringTier,
    HeldAnswer,
    Place,
    TierGet,
    TierPut,
    TierUsage,
    segment_place,
)
from holdfast.tiers.gate import MediumGate
from holdfast.tiers.pool.chain_links import ChainLinks
from holdfast.tiers.pool.connection_checks import check_members
from holdfast.tiers.pool.connections import TargetConnections
from holdfast.tiers.pool.health import HealthOptions, PoolHealth
from holdfast.tiers.pool.health_probe import HealthProbes
from holdfast.tiers.pool.hedged_read import HEDGED_BYTES_MAX, HedgedReads
from holdfast.tiers.pool.hot_segments import HotSegments
from holdfast.tiers.pool.lookup import Route, SegmentLookup
from holdfast.tiers.pool.parity import parity_key, parity_namespace
from holdfast.tiers.pool.parity_uses import ParityUses
from holdfast.tiers.pool.parity_writes import ParityWriteOptions, ParityWrites
from holdfast.tiers.pool.pool_calls import PoolCalls
from holdfast.tiers.pool.rewrites import LostBlocks, MisplacedBlocks
from holdfast.tiers.pool.segment_batch import (
    SegmentBatch,
    names_of,
    parts_by_lane,
    parts_of_chain,
    parts_of_gets,
    parts_of_puts,
)
from holdfast.tiers.pool.striped_lookup import StripedLookup
from holdfast.tiers.pool.striped_reads import Lateness, StripedReads
from holdfast.tiers.pool.target_statistics import CallKind
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.tiers.unverified_records import UnverifiedRecords
from holdfast.wire.remote.client import BlockCount, HeldFlags, ReceivedRecords, TargetClient
from holdfast.wire.remote.token import limits_of
from holdfast.workers import parallel, workers

HOT_COPIES = 2
"""Copies of a hot segment, each on another member."""

KNOWN_BYTES_MIN = 1 * MIB
"""Smallest part of a batch, in bytes, whose owner is asked which of its records it holds before
they are sent."""

_LIST_POLL_S = 0.01
"""Interval at which `wait_listed` checks the source for an error, in seconds."""

T = TypeVar("T")
_Tell: TypeAlias = Callable[[TargetClient, Namespace, Sequence[bytes], float], BlockCount]


class PoolTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of calls in seconds, and the options of membership and health.

    `segment_blocks` blocks of a chain are placed together, on one target, or striped over up to
    `stripe_targets`. All users of the pool must agree on both.
    """

    deadline_s: float = 2.0
    ask_s: float = 0.25
    segment_blocks: int = SEGMENT_BLOCKS
    stripe_targets: int = STRIPE_TARGETS
    threads: int = 16
    membership: MembershipOptions = MembershipOptions()
    health: HealthOptions = HealthOptions()


class PoolTier(AnsweringTier):
    """See `holdfast.tiers.base.SharedTier`. Owns the source and the connections it opens."""

    def __init__(
        self,
        source: MembershipSource,
        connect: Callable[[Member], TargetClient],
        options: PoolTierOptions | None = None,
        clock: Clock | None = None,
        name: str = "pool",
    ) -> None:
        self.name = name
        self.options = options or PoolTierOptions()
        clock = clock or SystemClock()
        self.membership = Membership(clock, self.options.membership)
        chance = random.Random()  # noqa: S311  # to choose between members, not for secrets
        self.health = PoolHealth(clock, self.options.health, chance)
        self._counts = TransferCounts()
        self.connections = TargetConnections(connect, self.health, self._counts)
        self.lookup = SegmentLookup(
            self.membership, self.health.trusted, self.health.unsure, self.options.stripe_targets
        )
        self.misplaced_blocks = MisplacedBlocks(clock)
        self._unverified_records = UnverifiedRecords()
        self._lost_blocks = LostBlocks(self.lookup.placement())
        self._probes = HealthProbes(
            self.lookup, self.health, self.connections, self.options.ask_s, self._keep
        )
        self.hot = HotSegments(clock)
        self._source = source
        self._connect = connect
        self._threads = workers(self.options.threads, f"holdfast-{name}")
        self.hedged_reads = HedgedReads(self.health, f"holdfast-{name}-hedged-read")
        self._gate = MediumGate()
        self._listed = threading.Event()
        segment_blocks, deadline_s = self.options.segment_blocks, self.options.deadline_s
        calls = PoolCalls(
            self._each, self._read, self._receive_found, self._exist, self._send, self._use,
            self.misplaced_blocks.found,
        )  # fmt: skip
        self._links = ChainLinks(segment_blocks)
        self._striped_lookup = StripedLookup(self.lookup, self._links, calls, segment_blocks)
        lateness = Lateness(self.health, self.hedged_reads.hedging)
        self._striped_reads = StripedReads(self.lookup, self._links, calls, lateness, deadline_s)
        self._parity_uses = ParityUses(clock, self.lookup, self._links, calls)
        self._parity = ParityWrites(
            clock,
            self.lookup,
            calls,
            self._parity_uses,
            ParityWriteOptions(deadline_s, segment_blocks),
        )
        source.watch(self._on_members)
        self._probes.start()
        if self.lookup.stripe > 1:
            self._parity.start()

    def wait_listed(self, within_s: float) -> bool:
        """Wait for the first member list, or for an error of its source, up to a time.

        Returns whether a list arrived. A tier that was just opened knows no members and would
        answer its first question from none.
        """
        end = time.monotonic() + within_s
        while not self._listed.wait(_LIST_POLL_S) and time.monotonic() < end:
            if self._source.trouble():
                break
        return self._listed.is_set()

    def known(self, batch: Sequence[TierPut]) -> list[bool]:
        """Ask the owners which records they hold already, because another host wrote them."""
        found = [False] * len(batch)
        parts = self._put_parts(batch, self.options.ask_s)
        self._each(parts, lambda part: self._find(part, batch, found))
        return found

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Send each record to the owner of its segment; OK once one copy is stored."""
        outcomes = [Outcome.GONE] * len(batch)
        parts = self._put_parts(batch, self.options.deadline_s)
        self._each(parts, lambda part: self._write(part, batch, outcomes))
        self._parity.add(batch, outcomes)
        return outcomes

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Receive records straight into their buffers, all segments concurrently."""
        outcomes = [Outcome.GONE if self._gate.is_shut else Outcome.LATE] * len(batch)
        if self.lookup.is_striped() and not self._gate.is_shut:
            outcomes = self._striped_reads.read(batch)
            self._parity_uses.note(batch, outcomes)
            return outcomes
        parts = parts_of_gets(batch, self.options.deadline_s)
        self._each(parts, lambda part: self._read(part, batch, outcomes))
        return outcomes

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> HeldAnswer:
        """Ask the members; OK if all that may hold the first missing block have answered."""
        found = bytearray(len(keys))
        ask_s = min(self.options.ask_s, within_s)
        until = time.monotonic() + ask_s
        if self.lookup.is_striped() and not self._gate.is_shut:
            return self._striped_lookup.ask(namespace, keys, start, until)
        parts = parts_of_chain(keys, start, self.options.segment_blocks, ask_s)
        answered = [Outcome.LATE] * len(keys)
        self._each(parts, lambda part: self._ask(part, namespace, keys, found, answered))
        missing = found.find(0, start)
        if missing < 0:
            return HeldAnswer(len(keys) - start, Outcome.OK)
        return HeldAnswer(missing - start, answered[missing])

    def announce(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, in_s: float
    ) -> None:
        """Have the owners read blocks from their disks into memory before they are read."""
        parts = parts_of_chain(keys, start, self.options.segment_blocks, self.options.ask_s)
        if self.lookup.is_striped():
            numbers = [number % self.options.segment_blocks for number in range(len(keys))]
            parts = parts_by_lane(parts, self.lookup.lanes(), numbers)

        def tell(part: SegmentBatch) -> None:
            wanted = [keys[index] for index in part.indices]
            for member in self.lookup.route(part.segment, 1, part.block).read[:1]:
                self.connections.call(
                    member, lambda target, _: target.prestage(namespace, wanted, in_s, part.left_s)
                )

        self._each(parts, tell)

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        """Report records to every member that may have served them; each checks its own."""
        for get in batch:
            self._unverified_records.add(get.namespace, get.key)
        self._tell_holders(
            batch, self.options.deadline_s, lambda target, *blocks: target.suspect(*blocks)
        )

    def delete(self, batch: Sequence[TierGet]) -> None:
        """Have every member that may hold a record delete it, and parity records that begin so.

        A member that keeps records in a bucket writes there before it answers.
        """
        rows = [
            get._replace(key=parity_key(get.key, n), namespace=parity_namespace(get.namespace))
            for get in (batch if self.lookup.is_striped() else ())
            for n in range(1, self.lookup.stripe)
        ]
        self._tell_holders(
            [*batch, *rows], self.options.deadline_s, lambda target, *blocks: target.delete(*blocks)
        )

    def misplaced(self, namespace: Namespace, keys: Sequence[bytes]) -> set[bytes]:
        """Return which of these came from a previous owner, or from a stand-in for the owner."""
        return self.misplaced_blocks.take(namespace, keys)

    def lost(self) -> Callable[[Place], bool] | None:
        """Return which places belonged to members that left, or have been down for long."""
        down = self.health.down(self.options.membership.dead_after_s)
        return self._lost_blocks.since(self.lookup.placement(), down)

    def reachable(self) -> bool:
        """Return whether any member may receive users' requests."""
        return any(self.health.trusted(member.id) for member in self.lookup.members())

    def may_write(self) -> bool:
        """Return whether the token permits writes; a token that is replaced counts at once."""
        return "write" in self.connections.may()

    def limits(self) -> str:
        """Return in words which permissions the token lacks; empty if it has all."""
        return limits_of(self.connections.may())

    def member_health(self) -> list[MemberStatus]:
        """Return the health of each member, from this host's requests to it."""
        return [
            msgspec.structs.replace(
                report,
                trouble=self.connections.trouble(report.target),
                page=self.connections.page(report.target),
            )
            for report in self.health.reports()
        ]

    def describe(self) -> dict[str, Any]:
        """Return the epoch, the source's error, and each member's health, for display."""
        if self._gate.is_shut:
            return {"tier": self.name, "members": []}
        view = self.membership.views().current.view
        shares = self.lookup.shares()
        reports = {report.target: msgspec.to_builtins(report) for report in self.health.reports()}
        checks = check_members(view.members, self._connect)
        members = [
            {
                **msgspec.to_builtins(member),
                **reports.get(member.id, {}),
                "share": shares.get(member.id, 0.0),
                "tiers": check.tiers,
                "condition": str(check.condition),
                "why": check.why,
                "answer_s": check.seconds,
                "trouble": self.connections.trouble(member.id),
                "page": self.connections.page(member.id),
            }
            for member, check in zip(view.members, checks, strict=True)
        ]
        return {
            "tier": self.name,
            "epoch": view.epoch,
            "digest": f"{view.digest:016x}",
            "trouble": self._source.trouble(),
            "limits": self.limits(),
            "hedges": self.hedged_reads.hedging.hedges,
            "moved": self.misplaced_blocks.moved,
            "lanes": self.lookup.lanes(),
            "rebuilt": self._striped_reads.rebuilt,
            "parity_records": self._parity.written,
            "parity_refused": self._parity.refused,
            "members": members,
        }

    def usage(self) -> TierUsage:
        """Return the bytes transferred, and blocks rebuilt; the members report their own usage."""
        return msgspec.structs.replace(
            self._counts.usage(),
            rebuilt=self._striped_reads.rebuilt,
            parity_bytes=self._parity.written_bytes,
        )

    def close(self) -> None:
        """Protect open rows, stop watching, wait for calls in progress, close the connections.

        Bounded in time.
        """
        self._parity.close()
        self._parity.end_all()
        self._gate.shut()
        self._source.close()
        self._probes.close()
        self._threads.shutdown()
        self.hedged_reads.close()
        self.connections.close()

    def _on_members(self, members: Sequence[Member]) -> None:
        self.membership.observe(members)
        self._keep()
        self._listed.set()

    def _keep(self) -> None:
        """Update the known members from the current routes; views change with time alone, too.

        A member that left the list is asked for its blocks as long as routes name it.
        """
        listed = [member.id for member in self.membership.views().current.view.members]
        known = [member.id for member in self.lookup.members()]
        self.health.keep(known, listed)
        self.connections.keep(known)

    def _each(self, items: Sequence[T], act: Callable[[T], object]) -> None:
        """Call a function for every item, concurrently; calls keep their own deadlines.

        Does nothing if the tier is closed. After it, no call uses the caller's buffers.
        """
        with self._gate.enter() as admitted:
            if admitted:
                parallel(act, items, self._threads)

    def _put_parts(self, batch: Sequence[TierPut], seconds: float) -> list[SegmentBatch]:
        """Split records to write by segment and lane, and note where they are in their chains."""
        parts, lanes = parts_of_puts(batch, seconds), self.lookup.lanes()
        if lanes == 1:
            return parts
        blocks = [0] * len(batch)
        for index, put in enumerate(batch):
            header = header_of_record(put.record)
            if header is not None:
                blocks[index] = header.depth % self.options.segment_blocks
                self._links.note_block(header.key, header.parent, header.depth)
        return parts_by_lane(parts, lanes, blocks)

    def _find(self, part: SegmentBatch, batch: Sequence[TierPut], found: list[bool]) -> None:
        """Ask all owners of a part which of its records they hold, if the part is large enough."""
        records = [batch[index].record for index in part.indices]
        namespace, keys = names_of(records)
        if namespace is None or sum(map(len, records)) < KNOWN_BYTES_MIN:
            return
        route = self._route(part)
        answers = [self._exist(one, part, namespace, keys).held for one in route.write]
        for index, key, *there in zip(part.indices, keys, *answers, strict=True):
            # The owner replaces an unverified record by one sealed with the same data key or a
            # later epoch's.
            found[index] = (
                bool(there) and all(there) and not self._unverified_records.has(namespace, key)
            )

    def _route(self, part: SegmentBatch) -> Route:
        """Return the members to write a part to."""
        copies = HOT_COPIES if self.hot.is_hot(part.segment) else 1
        return self.lookup.route(part.segment, copies, part.block)

    def _write(self, part: SegmentBatch, batch: Sequence[TierPut], outcomes: list[Outcome]) -> None:
        records = [batch[index].record for index in part.indices]
        route = self._route(part)
        for member in route.write:
            if not part.left_s:
                break
            stored = self._send(member, part, records)
            for index, outcome in zip(part.indices, stored, strict=False):
                if outcomes[index] is not Outcome.OK:
                    outcomes[index] = _late_if_unsent(outcome)
                if outcome is Outcome.OK and self._unverified_records:
                    header, _ = read_header(batch[index].record)
                    self._unverified_records.unmark(namespace_of(header), header.key)

    def _send(
        self, member: Member, part: SegmentBatch, records: Sequence[memoryview]
    ) -> Sequence[Outcome]:
        """Send records to one member; return the outcome of each that it answered for."""
        stored = self.connections.call(
            member,
            lambda target, on_progress: target.put(records, part.left_s, on_progress),
            sum(map(len, records)),
            CallKind.WRITE,
        )
        lengths = zip(map(len, records), stored or (), strict=False)
        self._counts.add(written_bytes=sum(n for n, outcome in lengths if outcome is Outcome.OK))
        return stored or ()

    def _read(self, part: SegmentBatch, batch: Sequence[TierGet], outcomes: list[Outcome]) -> None:
        """Ask one member after another for the records of a segment that are still missing.

        Records from another member than the owner are misplaced, and so are those that only one of
        two owners has: they were written before the segment was hot.
        """
        # One fetch reads a segment in many batches. Its first block, which names it, is in one.
        gets = (batch[index] for index in part.indices)
        begins = any(segment_place(get.key[:SEGMENT_BYTES]) == get.place for get in gets)
        hot = self.hot.hit(part.segment) if begins else self.hot.is_hot(part.segment)
        copies = HOT_COPIES if hot else 1
        route = self.lookup.route(part.segment, copies, part.block)
        owners = {*route.write, *self.lookup.owners(part.segment)}
        left = list(part.indices)
        members, asked = list(route.read), set[Member]()
        if route.owners >= HOT_COPIES:
            # The less busy of two owners comes first; a stand-in may lack the copy.
            first = self.health.choose([member.id for member in route.write[: route.owners]])
            members.sort(key=lambda member: member.id != first)
        if not members:  # none is reachable, so what they hold is not known
            for index in left:
                outcomes[index] = Outcome.GONE
        nbytes = sum(len(batch[index].into) for index in left)
        missed = False
        if copies > 1 and len(members) > 1 and nbytes <= HEDGED_BYTES_MAX:
            left, asked, missed = self.hedged_reads.run(
                members, part, batch, outcomes, self._receive
            )
            if missed:
                self._note_misplaced(batch, part.indices[: len(part.indices) - len(left)])
        for member in members:
            if left and member not in asked:
                before, owns = left, member in owners
                left = self._receive(member, part._replace(indices=left), batch, outcomes)
                if missed or not owns:
                    self._note_misplaced(batch, before[: len(before) - len(left)])
                had_copy = copies > 1 and member in route.write
                missed |= had_copy and bool(left) and outcomes[left[0]] is Outcome.MISS
        done = [batch[i].into for i in part.indices if outcomes[i] is Outcome.OK]
        self._counts.add(read_bytes=sum(map(record_length, done)))

    def _note_misplaced(self, batch: Sequence[TierGet], came: Sequence[int]) -> None:
        if came:
            keys = [batch[index].key for index in came]
            self.misplaced_blocks.found(batch[came[0]].namespace, keys)

    def _receive_found(
        self, member: Member, part: SegmentBatch, batch: Sequence[TierGet], outcomes: list[Outcome]
    ) -> list[int]:
        """Receive records that a member has answered that it holds, and count their bytes.

        If the part names a segment, records of a member that owns none of its lanes are misplaced.
        """
        left = self._receive(member, part, batch, outcomes)
        came = part.indices[: len(part.indices) - len(left)]
        if part.segment and member not in self.lookup.owners(part.segment):
            self._note_misplaced(batch, came)
        self._counts.add(read_bytes=sum(record_length(batch[index].into) for index in came))
        return left

    def _receive(
        self,
        member: Member,
        part: SegmentBatch,
        batch: Sequence[TierGet],
        outcomes: list[Outcome],
    ) -> list[int]:
        """Receive the leading run of a part from one member; return the indices left."""
        left = part.indices
        namespace = batch[left[0]].namespace
        wanted = [batch[index] for index in left]
        if not part.left_s:
            return left
        keys, into = [get.key for get in wanted], [get.into for get in wanted]
        got = self.connections.call(
            member,
            lambda target, on_progress: target.get(namespace, keys, into, part.left_s, on_progress),
            sum(map(len, into)),
            CallKind.READ,
        )
        blocks, outcome, _ = got or ReceivedRecords(0, Outcome.GONE)
        for index in left[:blocks]:
            outcomes[index] = Outcome.OK
        left = left[blocks:]
        if outcome in (Outcome.GONE, Outcome.LATE, Outcome.UNSENT):
            for index in left:
                outcomes[index] = _late_if_unsent(outcome)
        elif left:
            for index in left:
                outcomes[index] = Outcome.MISS
            if outcome is not Outcome.OK:
                outcomes[left[0]] = outcome
        return left

    def _ask(
        self,
        part: SegmentBatch,
        namespace: Namespace,
        keys: Sequence[bytes],
        found: bytearray,
        answered: list[Outcome],
    ) -> None:
        """Record for each block of a part whether it is held, and the outcome of the question."""
        wanted = [keys[index] for index in part.indices]
        route = self.lookup.route(part.segment)
        outcome = Outcome.OK if route.read else Outcome.GONE
        for member in route.read:
            answer = self._exist(member, part, namespace, wanted)
            for index, there in zip(part.indices, answer.held, strict=True):
                found[index] |= there
            if all(answer.held):
                break
            if answer.outcome is not Outcome.OK:
                outcome = _late_if_unsent(answer.outcome)
        for index in part.indices:
            answered[index] = outcome

    def _exist(
        self,
        member: Member,
        part: SegmentBatch,
        namespace: Namespace,
        keys: Sequence[bytes],
    ) -> HeldFlags:
        """Ask a member, if there is time, which blocks it has; all 0 without an answer."""
        held = None
        if part.left_s:
            held = self.connections.call(
                member, lambda target, _: target.exist(namespace, keys, part.left_s)
            )
        return held or HeldFlags(bytes(len(keys)), Outcome.GONE if part.left_s else Outcome.LATE)

    def _use(
        self, member: Member, part: SegmentBatch, namespace: Namespace, keys: Sequence[bytes]
    ) -> None:
        """Tell a member that blocks are in use."""
        self.connections.call(member, lambda target, _: target.use(namespace, keys, part.left_s))

    def _tell_holders(self, batch: Sequence[TierGet], seconds: float, tell: _Tell) -> None:
        """Call `tell` with every member that may hold records, and the records it may hold."""

        def visit(part: SegmentBatch) -> None:
            namespace = batch[part.indices[0]].namespace
            keys = [batch[index].key for index in part.indices]
            members = dict.fromkeys(self.lookup.route(part.segment, HOT_COPIES).read)
            if self.lookup.is_striped():
                members |= dict.fromkeys(self.lookup.holders(part.segment))
            for member in members:
                if part.left_s:
                    self.connections.call(
                        member, lambda target, _: tell(target, namespace, keys, part.left_s)
                    )

        self._each(parts_of_gets(batch, seconds), visit)


def _late_if_unsent(outcome: Outcome) -> Outcome:
    """Return what the store is told: a record not sent in time is late."""
    return Outcome.LATE if outcome is Outcome.UNSENT else outcome
