"""A shared tier whose records are in segment objects on a medium: a bucket or a shared folder.

Lookups are answered from memory, from the index objects that the writers publish; no request of an
engine waits for a question to the medium. A read takes ranges of consecutive records straight into
the slots. A write packs records into objects of up to 64 MiB. All records are verified by key,
fingerprint and length here, and by their tag in the store.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.blocks.envelope import Header, header_of_record, record_length
from holdfast.blocks.namespace import Namespace, namespace_digest, namespace_of
from holdfast.errors import Outcome
from holdfast.status import MemberStatus
from holdfast.tiers.base import (
    NOWHERE,
    AnsweringTier,
    HeldAnswer,
    Place,
    TierGet,
    TierPut,
    TierUsage,
)
from holdfast.tiers.gate import MediumGate
from holdfast.tiers.segments.bounds import AGED, SpaceLimits, is_near_end
from holdfast.tiers.segments.format import (
    SEGMENT_BYTES,
    DurableSegment,
    IndexedSegment,
    IndexObject,
    RemovedBlocks,
    SegmentName,
)
from holdfast.tiers.segments.index import RecordPosition, SegmentIndex
from holdfast.tiers.segments.index_log import IndexPublisher
from holdfast.tiers.segments.medium import MediumAnswer, SegmentMedium
from holdfast.tiers.segments.medium_health import MediumHealth
from holdfast.tiers.segments.packer import RecordToPack, SegmentPacker
from holdfast.tiers.segments.range_reads import RangeRead, range_reads
from holdfast.tiers.segments.request_slots import RequestSlots
from holdfast.tiers.segments.resave import SegmentResaver
from holdfast.tiers.segments.upkeep import SegmentUpkeep, UpkeepLimits
from holdfast.tiers.segments.writer import SegmentWriter
from holdfast.tiers.transfer_counts import TransferCounts
from holdfast.tiers.unverified_records import UnverifiedRecords, check_again
from holdfast.wire.remote.stream import Deadline
from holdfast.workers import parallel, workers

_DURABLE_AHEAD_S = 3_600.0
"""Time in seconds for which a segment is listed as durable beyond what is asked for, so that it is
not listed again with each `sync`."""


class SegmentTierLimits(NamedTuple):
    """Limits of a segment tier; times in seconds.

    `read_s` and `write_s` bound one read and one write, `ask_s` the wait of a lookup for the first
    listing. `reads` and `writes`: most ranges and most puts at a time. `poll_s`: interval between
    listings of index objects. `capacity_bytes` bounds all segments on the medium; 0: no bound.
    `gather_s`: how long a store may wait for more blocks, before it writes a smaller segment.
    """

    read_s: float = 2.0
    write_s: float = 20.0
    ask_s: float = 0.25
    reads: int = 16
    writes: int = 4
    poll_s: float = 60.0
    capacity_bytes: int = 0
    gather_s: float = 0.0


class SegmentTier(AnsweringTier):
    """See `holdfast.tiers.base.SharedTier`. Opens even if the medium does not answer yet.

    The tier owns the medium and closes it.
    """

    def __init__(
        self, medium: SegmentMedium, writer: SegmentWriter, limits: SegmentTierLimits, name: str
    ) -> None:
        self.name = name
        self.batch_bytes, self.batch_wait_s = SEGMENT_BYTES, limits.gather_s
        self._medium = medium
        self._writer = writer
        self._limits = limits
        self._gate = MediumGate()
        self._counts = TransferCounts()
        self._index = SegmentIndex()
        self._reads = MediumHealth(f"{name}: reading", writer.clock)
        self._writes = MediumHealth(f"{name}: writing", writer.clock)
        self._slots = RequestSlots(limits.reads, limits.writes)
        self._threads = workers(limits.reads, f"holdfast-{name}")
        self._publisher = IndexPublisher(medium, writer)
        self._unverified = UnverifiedRecords()
        self._packer = SegmentPacker(
            self._put, self._publish, self._discard, self._slots, writer.new_segment
        )
        self._resaver = SegmentResaver(medium, self._index, self._packer, self._slots)
        self._upkeep = SegmentUpkeep(
            medium,
            self._index,
            self._publisher,
            self._reads,
            UpkeepLimits(limits.poll_s, limits.read_s, SpaceLimits(limits.capacity_bytes)),
            writer,
        )
        self._stale_lock = threading.Lock()
        self._stale = 0
        self._packer.start(limits.writes, name)
        self._upkeep.start(self._threads, name)
        self._resaver.start(name)

    # Lookups.

    def ask(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, within_s: float = math.inf
    ) -> HeldAnswer:
        """Count leading blocks in the local index; the medium is not asked."""
        deadline = Deadline.within(min(self._limits.ask_s, within_s))
        if self._gate.is_shut:
            return HeldAnswer(0, Outcome.GONE)
        if deadline.over or not self._upkeep.await_start(deadline):
            return HeldAnswer(0, Outcome.LATE)
        if not self.reachable():
            return HeldAnswer(0, Outcome.GONE)
        run = self._index.held_run(namespace_digest(namespace), keys[start:])
        return HeldAnswer(run, Outcome.OK)

    def indexed(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Return which blocks the local index has; none before the first listing."""
        started = self._upkeep.await_start(Deadline.within(0.0))
        if self._gate.is_shut or not started or not self.reachable():
            return bytes(len(keys))
        return self._index.held(namespace_digest(namespace), keys)

    def aged(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Return which blocks are in segments that a new one outlasts by `AGED`."""
        names = self._segments_of(namespace, keys)
        return bytes(name is not None and self._writer.outlasts(name, AGED) for name in names)

    def refresh(self, namespace: Namespace, keys: Sequence[bytes], within_s: float) -> bool:
        """List index objects, if any of the blocks is in a segment of another writer."""
        names = self._segments_of(namespace, keys)
        if all(name is None or name.writer == self._writer.id for name in names):
            return True
        return self._upkeep.refresh(Deadline.within(within_s))

    def keep_durable(
        self, namespace: Namespace, keys: Sequence[bytes], until_s: float, within_s: float
    ) -> bytes | None:
        """Publish which segments of this writer have durable blocks.

        Only the writer of a segment knows whether it is about to retire it. So if there is a limit
        of bytes, a block in a segment of another writer, which does not list it as durable, is kept
        after another write.
        """
        own = self._index.segments_of_writer(namespace_digest(namespace), keys, self._writer.id)
        new = [
            DurableSegment(name.path, min(until_s + _DURABLE_AHEAD_S, name.expires_s()))
            for name in sorted({name for name in own if name is not None})
            if not self._is_durable(name, until_s)
        ]
        if new:
            with self._gate.enter() as admitted:
                if not admitted or self._upkeep.read_only:
                    return None
                content, deadline = IndexObject(durable=new), Deadline.within(within_s)
                answer = self._writes.call(lambda: self._publisher.publish(content, deadline))
            if answer.outcome is not Outcome.OK:
                return None
            self._index.keep(new, self._writer.wall_s())
        is_bounded = self._limits.capacity_bytes > 0
        found = self._segments_of(namespace, keys)
        return bytes(
            (mine is not None and self._is_durable(mine, until_s))
            or (name is not None and (not is_bounded or self._is_durable(name, until_s)))
            for mine, name in zip(own, found, strict=True)
        )

    def _is_durable(self, name: SegmentName, until_s: float) -> bool:
        """Return whether a segment is listed as durable until then, or until its end."""
        return self._index.durable_until_s(name) >= min(until_s, name.expires_s())

    def _segments_of(self, namespace: Namespace, keys: Sequence[bytes]) -> list[SegmentName | None]:
        digest = namespace_digest(namespace)
        found = self._index.positions([(digest, key) for key in keys], None)
        return [self._index.name_of(at.segment) if at is not None else None for at in found]

    def known(self, batch: Sequence[TierPut]) -> list[bool]:
        """Return for each block whether an object has it, as far as this process knows."""
        headers = [header_of_record(put.record) for put in batch]
        blocks = [
            (namespace_digest(namespace_of(header)), header.key)
            if header
            else (bytes(16), bytes(16))
            for header in headers
        ]
        found = self._index.positions(blocks, self._writer.clock.now())
        return [
            position is not None and header is not None and not self._is_replaced_by(header)
            for header, position in zip(headers, found, strict=True)
        ]

    def reachable(self) -> bool:
        """Return whether the last read of the medium did not fail, and no probe refused it."""
        return self._reads.is_closed() and not self._upkeep.refusal

    def may_write(self) -> bool:
        """Return whether the credentials permit writes, and the last write did not fail."""
        return not self._upkeep.read_only and self._writes.allows()

    def limits(self) -> str:
        """Return in words what the credentials do not permit."""
        return self._upkeep.read_only

    # Reads.

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Read ranges of consecutive records in parallel, each straight into its slots."""
        deadline = Deadline.within(self._limits.read_s)
        with self._gate.enter() as admitted:
            if not admitted:
                return [Outcome.GONE] * len(batch)
            outcomes = self._read(batch, deadline)
        sizes = [
            record_length(get.into)
            for get, outcome in zip(batch, outcomes, strict=True)
            if outcome is Outcome.OK
        ]
        failed = any(outcome in (Outcome.GONE, Outcome.LATE) for outcome in outcomes)
        self._counts.add(read_bytes=sum(sizes), failures=int(failed))
        return outcomes

    def _read(self, batch: Sequence[TierGet], deadline: Deadline) -> list[Outcome]:
        if not self._upkeep.await_start(deadline):
            return [Outcome.LATE] * len(batch)
        if self._upkeep.refusal:
            return [Outcome.GONE] * len(batch)
        blocks = [(namespace_digest(get.namespace), get.key) for get in batch]
        is_use = any(get.is_use for get in batch)
        positions = self._index.positions(blocks, self._writer.clock.now() if is_use else None)
        outcomes = [Outcome.MISS] * len(batch)
        if not self._reads.allows():
            return [Outcome.GONE] * len(batch)

        def take(wanted: RangeRead) -> None:
            self._take(wanted, batch, positions, outcomes, deadline)

        ranges = list(range_reads(positions, [len(get.into) for get in batch]))
        parallel(take, ranges, self._threads)
        return outcomes

    def _take(
        self,
        wanted: RangeRead,
        batch: Sequence[TierGet],
        positions: Sequence[RecordPosition | None],
        outcomes: list[Outcome],
        deadline: Deadline,
    ) -> None:
        """Read one range, and set the outcomes of its records."""
        name = self._index.name_of(wanted.segment)
        if name is None:
            return
        into, sizes = [], []
        for index in wanted.indices:
            position = positions[index]
            sizes.append(position.nbytes if position else 0)
            into.append(batch[index].into[: sizes[-1]])
        with self._slots.read(deadline) as admitted:
            if not admitted:
                answer = MediumAnswer(Outcome.LATE)
            else:
                answer = self._reads.call(
                    lambda: self._medium.read(name.path, wanted.start, into, deadline)
                )
        if answer.outcome is Outcome.MISS:
            self._note_stale(self._index.forget_segment(name))
            return
        if answer.outcome is not Outcome.OK:
            for index in wanted.indices:
                outcomes[index] = answer.outcome
            return
        end = 0
        for index, nbytes in zip(wanted.indices, sizes, strict=True):
            end += nbytes
            get = batch[index]
            if end <= answer.nbytes and _is_record_of(get, nbytes):
                outcomes[index] = Outcome.OK
            else:
                self._note_stale(self._index.forget_blocks(name, get.key))
        is_use = any(batch[index].is_use for index in wanted.indices)
        near_end = is_near_end(name, self._writer.wall_s())
        if is_use and near_end and self._writer.outlasts(name):
            self._resaver.add(name)

    # Writes.

    def write(self, batch: Sequence[TierPut]) -> list[Outcome]:
        """Pack records with those of other callers into objects, and publish these.

        A block that is held is written again; `known` tells which are.
        """
        deadline = Deadline.within(self._limits.write_s)
        outcomes = [Outcome.CORRUPT] * len(batch)
        items: list[tuple[int, Header, RecordToPack]] = []
        for number, put in enumerate(batch):
            header = header_of_record(put.record)
            if header is None or len(put.record) != header.stored_bytes:
                continue
            digest = namespace_digest(namespace_of(header))
            items.append((number, header, RecordToPack(digest, header.key, put.record)))
        with self._gate.enter() as admitted:
            failed = self._refused_write(admitted, deadline) if items else None
            if failed is not None:
                stored = [failed] * len(items)
            else:
                self._remove_replaced([header for _, header, _ in items])
                stored = self._packer.save([item for _, _, item in items], deadline)
        for (number, header, _), outcome in zip(items, stored, strict=True):
            outcomes[number] = outcome
            if outcome is Outcome.OK:
                self._unverified.unmark(namespace_of(header), header.key)
        written = [
            len(put.record)
            for put, outcome in zip(batch, outcomes, strict=True)
            if outcome is Outcome.OK
        ]
        failures = any(outcome in (Outcome.GONE, Outcome.LATE) for outcome in outcomes)
        self._counts.add(written_bytes=sum(written), failures=int(failures))
        return outcomes

    def flush(self, places: Sequence[Place]) -> list[bool]:
        """Return True for all: what `write` has stored is on the medium, with its index object."""
        return [True] * len(places)

    def _refused_write(self, admitted: bool, deadline: Deadline) -> Outcome | None:  # noqa: FBT001
        """Return the outcome of a write that is not tried; None if it may be."""
        if not admitted:
            return Outcome.GONE
        if not self._upkeep.await_start(deadline):
            return Outcome.LATE
        if self._upkeep.refusal or self._upkeep.read_only:
            return Outcome.GONE
        capacity = self._limits.capacity_bytes
        if capacity and self._index.stored_bytes + self._upkeep.refused_bytes >= capacity:
            self._upkeep.wake()
            return Outcome.FULL
        return None

    def _put(
        self, name: SegmentName, parts: Sequence[memoryview], deadline: Deadline
    ) -> MediumAnswer:
        return self._writes.call(lambda: self._medium.put(name.path, parts, deadline))

    def _publish(self, listed: IndexedSegment, deadline: Deadline) -> MediumAnswer:
        answer = self._writes.call(lambda: self._publisher.publish(IndexObject([listed]), deadline))
        if answer.outcome is Outcome.OK:
            self._index.add(listed, self._writer.clock.now())
            self._reads.note_answer()
        return answer

    def _discard(self, name: SegmentName) -> None:
        self._upkeep.discard(name)

    # Deletion.

    def delete_corrupt(self, batch: Sequence[TierGet]) -> None:
        """Read the records again, and forget those that fail a check without a key.

        Copies of them in other segments stay, and are found from now on.
        """
        self._publish_removed(self._forget(check_again(self.read, batch, self._unverified)))

    def delete(self, batch: Sequence[TierGet]) -> None:
        """Forget all copies of the records here, and publish that they are deleted.

        Their bytes leave the medium with the segment: at once if no other block of it is held.
        Waits for the first listing, which tells what there is to delete.
        """
        self._upkeep.await_start(Deadline.within(self._limits.read_s))
        removed: dict[SegmentName, bytes] = {}
        while found := self._forget(batch):
            for name, keys in found.items():
                removed[name] = removed.get(name, b"") + keys
        self._publish_removed(removed)

    def _forget(self, batch: Sequence[TierGet]) -> dict[SegmentName, bytes]:
        """Forget the copies that a read of these records finds; return their keys by segment."""
        blocks = [(namespace_digest(get.namespace), get.key) for get in batch]
        positions = self._index.positions(blocks, None)
        keys: dict[SegmentName, bytes] = {}
        for get, position in zip(batch, positions, strict=True):
            name = self._index.name_of(position.segment) if position else None
            if name is not None:
                keys[name] = keys.get(name, b"") + get.key
        return {
            name: of_segment
            for name, of_segment in keys.items()
            if self._index.forget_blocks(name, of_segment)
        }

    def _publish_removed(self, keys: Mapping[SegmentName, bytes]) -> None:
        removed = [RemovedBlocks(name.path, of_segment) for name, of_segment in keys.items()]
        with self._gate.enter() as admitted:
            if removed and admitted and not self._upkeep.read_only:
                deadline = Deadline.within(self._limits.read_s)
                content = IndexObject(removed=removed)
                self._writes.call(lambda: self._publisher.publish(content, deadline))
                self._upkeep.wake()

    # Reports.

    def describe(self) -> dict[str, Any]:
        """Return the medium, its health, and the segments, bytes and blocks of the index."""
        segments, nbytes, blocks = self._index.counts()
        medium = {
            **self._medium.describe(),
            "reads": self._upkeep.refusal or self._reads.describe()["state"],
            "writes": self._upkeep.read_only or self._writes.describe()["state"],
            "segments": segments,
            "stored_bytes": nbytes,
            "blocks": blocks,
            "index_bytes": self._index.nbytes,
            "stale_blocks": self._stale,
            "objects_written": self._packer.objects,
            "segments_deleted": self._upkeep.deleted,
            "undeletable_bytes": self._upkeep.refused_bytes,
        }
        return {
            "tier": self.name,
            "members": [],
            "medium": medium,
            "limits": self._upkeep.read_only,
        }

    def member_health(self) -> Sequence[MemberStatus]:
        """Return the medium as the only member."""
        health = self._reads.describe()
        trouble = self._upkeep.refusal or ("" if health["state"] == "active" else health["state"])
        target = str(self._medium.describe().get("address", self.name))
        return [MemberStatus(target, phase=health["phase"], trouble=trouble)]

    def usage(self) -> TierUsage:
        """Return the bytes and blocks of all segments, and this process's counters.

        Bytes of segments that were retired here and could not be deleted count, too.
        """
        counted = self._counts.usage()
        _, nbytes, blocks = self._index.counts()
        stopped = "" if self._writes.is_closed() else self._writes.describe()["state"]
        requests = self._medium.requests()
        return TierUsage(
            self._limits.capacity_bytes,
            nbytes + self._upkeep.refused_bytes,
            blocks,
            counted.read_bytes,
            counted.written_bytes,
            counted.failures,
            stopped,
            requests=dict(requests.by_verb),
            request_dollars=requests.dollars,
        )

    def close(self) -> None:
        """Close the medium, which ends calls in progress, and wait for their ends.

        The store closes its tiers after its last write, so a put under way here came too late.
        """
        self._reads.close()
        self._writes.close()
        self._medium.close()
        self._upkeep.close()  # calls may wait for its first listing
        if not self._gate.shut():
            return
        self._packer.close()
        self._resaver.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _remove_replaced(self, headers: Sequence[Header]) -> None:
        """Delete unverified records that are written again, whatever their segments' names say."""
        replaced = [
            TierGet(NOWHERE, header.key, memoryview(b""), namespace_of(header))
            for header in headers
            if self._is_replaced_by(header)
        ]
        if replaced:
            self.delete(replaced)

    def _is_replaced_by(self, header: Header) -> bool:
        return self._unverified.is_replaced_by(namespace_of(header), header)

    def _note_stale(self, blocks: int) -> None:
        """Count blocks that the index named and the medium did not have."""
        with self._stale_lock:
            self._stale += blocks


def _is_record_of(get: TierGet, nbytes: int) -> bool:
    """Return whether a buffer starts with a record of the block, of this length."""
    header = header_of_record(get.into)
    return (
        header is not None
        and header.key == get.key
        and header.stored_bytes == nbytes
        and header.fingerprint == get.namespace.fingerprint
        and header.domain == get.namespace.domain
    )
