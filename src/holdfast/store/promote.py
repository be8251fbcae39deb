"""Promotion: read blocks from lower tiers into host slots, and own the writer threads.

Decide under the lock, move bytes without it, publish under it again. A promoted block is verified
in its host slot before it is published (`store/record_reader.py`). `store/tier_writer.py` moves
blocks to lower tiers.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.limits import MIB
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.estimates import Estimates
from holdfast.store.evict import reserve_slots
from holdfast.store.move_queues import MoveReason
from holdfast.store.pending_hints import PendingPrestage
from holdfast.store.record_reader import ReadRecord, RecordForm, RecordReader, WantedRecord
from holdfast.store.rewrite import rewrite_misplaced
from holdfast.store.tier_writer import TierWriter
from holdfast.tiers.base import Place, SharedTier, TierGet

BATCH_BYTES = 8 * MIB
"""Bytes of a read batch: few system calls, and verification starts soon."""

ENCODED_BATCH_BYTES = 4 * MIB
"""Raw bytes of a read batch of encoded records: one batch is decoded while the next is read."""

BATCH_S = 0.00125
"""Longest time of a read batch while other domains read from the tier (at least one block):
a batch in progress delays every other domain."""

_log = logging.getLogger("holdfast.store")


class Promotion(NamedTuple):
    """One block being promoted: its row and key, its source, and its host slot.

    `stored_bytes`: the size of the record at its source, that of a slot if it is not known.
    `erase_generation` is its domain's at the start.
    """

    row: int
    key: bytes
    tier: int
    source: Place
    slot: Place
    stored_bytes: int
    erase_generation: int


class TierRead(NamedTuple):
    """A batch of blocks that was read from a lower tier; times are nanoseconds since the epoch.

    `asked` and `arrived` count blocks; `nbytes` are the bytes of those that arrived.
    """

    tier: str
    asked: int
    arrived: int
    nbytes: int
    began_ns: int
    ended_ns: int


class ReadBatch(NamedTuple):
    """Blocks of one tier that are read together, and the read; for a prestage, or None."""

    namespace: Namespace
    tier: int
    promotions: Sequence[Promotion]
    reading: Future[TierRead]
    prestage: PendingPrestage | None = None


class BlockMover:
    """Moves blocks between the tiers of one store; owns the threads that do it.

    `readers`: the threads that read from each lower tier, shared fairly between domains by bytes.
    `move_bytes_per_s`: for each lower tier, the limit of moves to it from other lower tiers.
    """

    def __init__(
        self,
        table: BlockTable,
        estimates: Estimates,
        readers: Sequence[FairThreads],
        move_bytes_per_s: Sequence[float],
    ) -> None:
        self._table = table
        self._estimates = estimates
        self._readers = readers
        self._writers = [
            TierWriter(table, number, readers, self.wake, limit)
            for number, limit in enumerate(move_bytes_per_s, start=1)
        ]
        self._given_up: list[list[TierWriter]] = [[] for _ in self._writers]
        """By lower tier, former writers that may still be in a batch."""
        self._reader = RecordReader(table)
        self._prefetches: dict[int, ReadBatch] = {}
        """Prefetches that no fetch waits for yet, by row; under the store's lock."""

    def start(self) -> None:
        """Start the writer threads."""
        for writer in self._writers:
            writer.start()

    def reserve(self, namespace: Namespace, rows: Sequence[int]) -> list[Promotion]:
        """Reserve host slots for pinned rows that are not in memory; call under the lock.

        Stops at the first row without a slot, because blocks behind a hole cannot be used.
        """
        table, index = self._table, self._table.index
        if table.sealing.is_away(namespace.domain):
            return []
        below: list[tuple[int, bytes, int]] = []
        for row in dict.fromkeys(rows):  # a chain may name a block twice
            if table.is_on(row, HOST) or row in table.copies.fillings(HOST):
                continue
            key, tier = index.keys[row], index.fastest(row)
            if key is None or tier <= HOST:
                break
            below.append((row, key, tier))
        generation, promotions = table.erase_generation(namespace.domain), list[Promotion]()
        slots = reserve_slots(table, namespace, len(below))
        for (row, key, tier), slot in zip(below, slots, strict=False):
            table.copies.begin_filling(row, HOST)
            source, nbytes = table.copies.place(row, tier), index.stored_bytes(row, tier)
            promotions.append(Promotion(row, key, tier, source, slot, nbytes, generation))
        table.pin([promotion.row for promotion in promotions])
        return promotions

    def start_reads(
        self,
        namespace: Namespace,
        promotions: Sequence[Promotion],
        priority: Priority = Priority.DEMAND,
        form: RecordForm = RecordForm.RAW,
        prestage: PendingPrestage | None = None,
    ) -> list[ReadBatch]:
        """Start reading blocks into their slots, in batches that follow chain order.

        Each tier's reads are shared fairly between domains, by bytes. Within a domain, short
        fetches pass long ones.
        """
        domain, size, started = namespace.domain, namespace.slot_bytes, list[ReadBatch]()
        request = len(promotions) * size
        share = self._table.usage.share(domain)
        for tier, group in itertools.groupby(promotions, key=lambda promotion: promotion.tier):
            run, readers = list(group), self._readers[tier - 1]
            encoded = any(promotion.stored_bytes < size for promotion in run)
            blocks = math.ceil((ENCODED_BATCH_BYTES if encoded else BATCH_BYTES) / size)
            if readers.shared(domain):
                blocks = max(1, int(min(blocks, BATCH_S * self._estimates.speed(tier) / size)))
            for at in range(0, len(run), blocks):
                read_batch = run[at : at + blocks]
                nbytes = len(read_batch) * size
                self._estimates.asked(tier, nbytes, domain)
                item = WorkItem(domain, nbytes, share, priority, request)
                reason = MoveReason.PRESTAGE if priority is Priority.PREFETCH else None
                work = partial(self._promote, namespace, tier, read_batch, form, reason)
                try:
                    reading = readers.submit(item, work)
                except RuntimeError:  # the store was closed: blocks on lower tiers are misses
                    self._estimates.dropped(tier, nbytes, domain)
                    with self._table.lock:
                        self._take_back(namespace, read_batch)
                    continue
                started.append(ReadBatch(namespace, tier, read_batch, reading, prestage))
                if priority is Priority.PREFETCH:
                    self._note_prefetches(started[-1])
        return started

    def raise_priority(self, rows: Iterable[int]) -> None:
        """Raise prefetches of rows that a fetch needs now to demand priority; under the lock."""
        for read_batch in self._for_later(rows):
            readers = self._readers[read_batch.tier - 1]
            readers.raise_priority(read_batch.namespace.domain, read_batch.reading)
            for promotion in read_batch.promotions:
                self._prefetches.pop(promotion.row, None)

    def give_up(self) -> None:
        """Cancel all prefetches that have not started."""
        with self._table.lock:
            read_batches = self._for_later(self._prefetches)
        self.cancel(read_batches)

    def end_prestages(self, rows: Sequence[int], ended: Callable[[PendingPrestage], bool]) -> None:
        """Cancel reads of these rows that such prestages queued and that have not started."""
        with self._table.lock:
            read_batches = self._for_later(rows)
        self.cancel([each for each in read_batches if each.prestage and ended(each.prestage)])

    def cancel(self, read_batches: Sequence[ReadBatch]) -> None:
        """Cancel batches that have not started and that no other fetch waits for."""
        for read_batch in read_batches:
            namespace, promotions = read_batch.namespace, read_batch.promotions
            with self._table.lock:  # so that no fetch starts to wait for it
                # A batch that is done, or was cancelled before, does not own its slots any more.
                fillings = self._table.copies.fillings(HOST)
                reads = [fillings.get(promotion.row) for promotion in promotions]
                kept = read_batch.reading.done() or any(read and read.waiting for read in reads)
                taken = not kept and read_batch.reading.cancel()
                if taken:
                    self._take_back(namespace, promotions)
            if taken:
                nbytes = len(promotions) * namespace.slot_bytes
                self._estimates.dropped(read_batch.tier, nbytes, namespace.domain)

    @property
    def prefetched(self) -> int:
        """Number of blocks that are being read ahead and that no fetch waits for yet."""
        with self._table.lock:
            return len(self._prefetches)

    def batches(self) -> tuple[list[int], list[int]]:
        """Return, by lower tier, how many write batches have begun, and how many have ended.

        While a writer that was given up is in a batch, the later ones do not count as ended. Call
        under the lock to compare what has begun with other changes of the store.
        """
        ended = [
            min([writer.batches_ended, *(e.batches_ended for e in former if e.is_in_batch)])
            for writer, former in zip(self._writers, self._given_up, strict=True)
        ]
        return [writer.batches_begun for writer in self._writers], ended

    def has_moves(self) -> bool:
        """Return whether a move to a lower tier is running, or may be made now."""
        running = self._table.queues.running
        with self._table.lock:
            return any(
                writer.has_moves() or running(number)
                for number, writer in enumerate(self._writers, start=1)
            )

    def give_up_hung_calls(self, number: int) -> None:
        """Go on after lower tier `number` has lost its drive, though calls of it may never return.

        Writers of other tiers may wait for such a call, too: they read what they move.
        """
        self._readers[number - 1].give_up_running()
        for at, writer in enumerate(self._writers):
            with self._table.lock:  # the new writer picks no block before `batches` counts it
                self._writers[at] = other = writer.without_hung_calls()
                former = [*self._given_up[at], *([] if other is writer else [writer])]
                self._given_up[at] = [each for each in former if each.is_in_batch]

    def wake(self, hurried: Collection[int] = ()) -> None:
        """Wake the writer threads; those of the tiers `hurried` wait for no more blocks."""
        for number, writer in enumerate(self._writers, start=1):
            if number in hurried:
                writer.hurry()
            else:
                writer.wake()

    def hurry(self) -> None:
        """Make the writer threads write what is queued, without a wait for more blocks."""
        self.wake(range(1, len(self._writers) + 1))

    def close(self, write_s: float) -> None:
        """Write queued blocks for at most `write_s`, then stop the threads."""
        until = time.monotonic() + write_s
        for writer in self._writers:
            writer.end_by(until)
        for writer in self._writers:
            writer.close()
        for readers in self._readers:
            readers.shutdown()

    def _note_prefetches(self, read_batch: ReadBatch) -> None:
        with self._table.lock:
            if not read_batch.reading.done():
                rows = (promotion.row for promotion in read_batch.promotions)
                reads = self._table.copies.fillings(HOST)
                self._prefetches |= {row: read_batch for row in rows if row in reads}

    def _for_later(self, rows: Iterable[int]) -> list[ReadBatch]:
        batches = (self._prefetches[row] for row in rows if row in self._prefetches)
        return list({id(batch): batch for batch in batches}.values())

    def _take_back(self, namespace: Namespace, promotions: Sequence[Promotion]) -> None:
        """Return slots that no read has started to fill; under the lock."""
        self._table.give_back(namespace, [promotion.slot for promotion in promotions])
        self._end_reads(promotions)

    def _promote(
        self,
        namespace: Namespace,
        tier: int,
        read_batch: Sequence[Promotion],
        form: RecordForm,
        reason: MoveReason | None,
    ) -> TierRead:
        """Read one batch into its slots, opened, verified and decoded; publish it.

        `reason`: why it moves to memory; None if a request waits for it.
        """
        began_ns = time.time_ns()
        table, lower = self._table, self._table.lower[tier - 1]
        host, size = table.host(namespace), namespace.slot_bytes
        wanted = [
            WantedRecord(each.source, each.key, host.view(each.slot, size), each.stored_bytes)
            for each in read_batch
        ]
        records = [ReadRecord(Outcome.GONE)] * len(read_batch)
        try:
            records = self._reader.read(namespace, tier, wanted, form)
        except Exception:  # noqa: BLE001  # a tier may be third-party code; no request fails for it
            _log.exception("reading failed tier=%s", lower.name)
        finally:
            arrived = sum(record.outcome is Outcome.OK for record in records) * size
            self._estimates.arrived(tier, arrived, namespace.domain, of=len(read_batch) * size)
            promoted = self._land(namespace, read_batch, records, reason)
        ended_ns = time.time_ns()
        bad = [
            TierGet(each.place, each.key, each.slot, namespace)
            for each, record in zip(wanted, records, strict=True)
            if record.is_damaged
        ]
        # Before this batch's future is done, so that the next write of these blocks replaces them.
        if bad and isinstance(lower, SharedTier) and not table.sealing.is_away(namespace.domain):
            lower.delete_corrupt(bad)
        good = [e.key for e, r in zip(wanted, records, strict=True) if r.outcome is Outcome.OK]
        if rewrite_misplaced(table, tier, namespace, good) or promoted:
            self.wake()
        asked, nbytes = len(read_batch), len(good) * size
        return TierRead(lower.name, asked, len(good), nbytes, began_ns, ended_ns)

    def _land(
        self,
        namespace: Namespace,
        read_batch: Sequence[Promotion],
        records: Sequence[ReadRecord],
        reason: MoveReason | None,
    ) -> bool:
        """Publish the blocks that arrived; return whether some are queued for a tier between."""
        table, promoted = self._table, False
        with table.lock:
            landed, away = dict[int, Place](), table.sealing.is_away(namespace.domain)
            sources, read = dict[int, int](), list[Place]()
            erase_generation = table.erase_generation(namespace.domain)
            for promotion, record in zip(read_batch, records, strict=True):
                outcome = record.outcome
                there = table.copies.place(promotion.row, promotion.tier)
                is_dropped = table.copies.fillings(HOST)[promotion.row].is_dropped
                stale = is_dropped or promotion.erase_generation != erase_generation
                if outcome is Outcome.OK:
                    read.append(promotion.source)
                if outcome is Outcome.OK and not away and not stale:
                    landed[promotion.row] = promotion.slot
                    if record.is_encoded:
                        table.encoded.add(promotion.row)
                    if record.stored_bytes != promotion.stored_bytes and there == promotion.source:
                        table.note_size(promotion.row, promotion.tier, record.stored_bytes)
                    sources[promotion.row] = promotion.tier
                else:
                    table.give_back(namespace, [promotion.slot])
                    if outcome is not Outcome.OK and there == promotion.source and not away:
                        table.read_failed(promotion.row, promotion.tier, outcome)
            if read:
                table.failed_reads.note_read(read_batch[0].tier, read, table.clock.now())
            try:
                table.publish_here(namespace, landed)
                table.enter_host(list(landed))
                for row, tier in sources.items():
                    if reason is not None:
                        table.movement.count((tier, HOST, reason), namespace.slot_bytes)
                    promoted |= table.movement.promoted(row, tier)
            finally:
                self._end_reads(read_batch)
        return promoted

    def _end_reads(self, promotions: Sequence[Promotion]) -> None:
        """Wake the fetches that wait for these blocks; call under the lock."""
        for promotion in promotions:
            self._prefetches.pop(promotion.row, None)
            self._table.copies.end_filling(promotion.row, HOST)
        self._table.unpin([promotion.row for promotion in promotions])
