"""Move blocks to one lower tier, in the background: what is saved, promoted, demoted or rewritten.

The writer picks a batch of moves under the store's lock, moves bytes without it, and publishes the
copies under it. Each tier has its own queue and thread, so that a slow pool does not delay the
disk. A block in memory is taken from its slot; any other is read from the fastest tier that holds
it into a staging buffer, and moved as it is stored there (`store/move_source.py`). If the tier's
codec pays, blocks are encoded into staging memory. A batch that is read or encoded is divided into
groups, each of which is prepared while the previous one is written. An encoded group gets places
for the size that it has then.
Blocks of a sealed domain are sealed into staging memory in groups. The cipher releases the GIL, so
some groups are sealed while others are written.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import compress

from holdfast.buffers import aligned_buffer
from holdfast.codec.seal import Sealer
from holdfast.errors import ConfigError, Outcome
from holdfast.failpoints import reach
from holdfast.fairness.fair_threads import FairThreads
from holdfast.limits import MIB
from holdfast.store.block_table import BlockTable
from holdfast.store.candidates import CandidateWatch
from holdfast.store.evict import evict_below
from holdfast.store.move_queues import BlockMove, MoveReason
from holdfast.store.move_source import MoveSource, MovingBlock
from holdfast.store.record_encoder import RecordEncoder
from holdfast.store.rewrite import defer_queued
from holdfast.store.sealing import UNKNOWN_EPOCH
from holdfast.store.write_batches import (
    LOCAL_SEAL,
    SHARED_SEAL,
    BatchWait,
    batch_limits,
    groups_of,
)
from holdfast.tiers.base import (
    NOWHERE,
    Flushable,
    LocalTier,
    Place,
    Queryable,
    SharedTier,
    TierPut,
    takes_writes,
)
from holdfast.tiers.checked import CheckedLocalTier
from holdfast.workers import submit_or_run, workers

AHEAD_GROUP_BYTES = 8 * MIB
"""Raw bytes of a group that is read and encoded while the previous one is written. A shared tier's
groups are as long as those that are sealed, if that is longer."""

STAGED_GROUP_BYTES = 4 * MIB
"""As `AHEAD_GROUP_BYTES`, of a group that is read and not encoded: reads of requests wait for what
the drive has begun."""

_ENCODED_BATCH_BYTES = 16 * AHEAD_GROUP_BYTES
"""Raw bytes of a batch to be encoded: many groups, because nothing is written beside the first."""

_LOOK_AGAIN_S = 0.5
"""Interval in seconds at which an idle writer checks its queue."""

_STOP_S = 5.0
"""Seconds that `close` waits for the current batch after the deadline."""

_log = logging.getLogger("holdfast.store")


class TierWriter:
    """Makes the queued moves to lower tier `number` (1 is the first below the host).

    `readers`: the threads that read from each lower tier. `wake_writers` wakes the writers of all
    tiers; those whose numbers it gets wait for no more blocks. `bytes_per_s` limits the bytes moved
    from other lower tiers.
    """

    def __init__(
        self,
        table: BlockTable,
        number: int,
        readers: Sequence[FairThreads],
        wake_writers: Callable[[Collection[int]], None],
        bytes_per_s: float = math.inf,
    ) -> None:
        self._table = table
        self._number = number
        self._candidates = CandidateWatch(table, number, wake_writers)
        self._readers = readers
        self._wake_writers = wake_writers
        self._bytes_per_s = bytes_per_s
        self._from_below_at = -math.inf
        """When blocks that need not be in memory may be moved again."""
        self._tier = tier = table.lower[number - 1]
        self._local = tier if isinstance(tier, LocalTier) else None
        self._work = threading.Condition()
        self._closing = self._is_given_up = False
        self._until = math.inf
        self.batches_begun = self.batches_ended = 0
        name = f"holdfast-to-{self._tier.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._parallel = SHARED_SEAL if isinstance(self._tier, SharedTier) else LOCAL_SEAL
        hosts = [*table.hosts.values(), *filter(None, [table.foreign])]
        self._batch = batch_limits(tier, hosts)
        self._batch_wait = BatchWait(self._batch, table.clock)
        self._hurries = False
        """Whether what is queued is written without a wait for more."""
        if self._batch.preferred_bytes:
            size = self._batch.preferred_bytes
            self._parallel = self._parallel._replace(group_bytes_min=size, group_bytes_max=size)
        self._encoder = RecordEncoder(table, table.codecs[number - 1])
        self._source = MoveSource(table, number, readers, self._encoder.wants)
        self._ahead: ThreadPoolExecutor | None = None
        self._sealers: ThreadPoolExecutor | None = None
        self._work_slots = threading.BoundedSemaphore(self._parallel.sealed_at_once)
        # One for each sealing thread, and one for the writer, if the pool takes no more work.
        self._stages = [aligned_buffer(0) for _ in range(self._parallel.groups + 1)]

    def start(self) -> None:
        """Start the writer thread."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the writer, because a block is queued."""
        with self._work:
            self._work.notify()

    def hurry(self) -> None:
        """Write what is queued now, without a wait for more blocks."""
        with self._work:
            self._hurries = True
            self._work.notify()

    def has_moves(self) -> bool:
        """Return whether a move may be made now; one beyond the limit of moves may not."""
        queues, number = self._table.queues, self._number
        waiting, from_below = queues.length(number), queues.from_below(number)
        return waiting > from_below or (from_below > 0 and self._may_move_from_below())

    def without_hung_calls(self) -> TierWriter:
        """Return the writer to use from now on, after a drive was lost whose calls may hang.

        That is this one, unless it is in a batch. Then it is a new one, which is started, and this
        one ends with its batch. Until then, what it writes or reads belongs to it: its buffers, and
        the blocks, which are not evicted. Those that it does not write are queued again. It is
        this one, too, if no thread can be started. Call under the lock of the store.
        """
        with self._work:  # so that no batch begins meanwhile
            if not self.is_in_batch:
                return self
            other = TierWriter(
                self._table, self._number, self._readers, self._wake_writers, self._bytes_per_s
            )
            other.batches_begun = other.batches_ended = self.batches_begun
            try:
                other.start()
            except RuntimeError as error:
                _log.warning(
                    "%s: no thread to write to the drive that replaces a lost one tier=%s; blocks "
                    "are written when the calls on the lost one have ended; raise the limit of "
                    "threads",
                    *(error, self._tier.name),
                )
                return self
            self._is_given_up = True
        return other

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch has begun and has not ended."""
        return self.batches_begun != self.batches_ended

    def end_by(self, until: float) -> None:
        """Write queued blocks until this monotonic time, then drop the rest and stop."""
        with self._work:
            self._until = until
            self._closing = True
            self._work.notify()

    def close(self) -> None:
        """Wait until the writer thread ends; call after `end_by`."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._until - time.monotonic()) + _STOP_S)
        for pool in (self._sealers, self._ahead):
            if pool:
                pool.shutdown(wait=not self._thread.is_alive())

    def _run(self) -> None:
        queues, number = self._table.queues, self._number
        while not self._is_given_up:
            waits = self._waits_for_more()  # takes the store's lock, so not below
            with self._work:
                if not self.has_moves():
                    if self._closing:
                        return
                    self._hurries &= queues.length(number) > 0  # moves may be paced
                    if not self._work.wait(_LOOK_AGAIN_S):
                        self._source.end()  # not between two moves: new memory must be cleared
                elif waits and not (self._hurries or self._closing):
                    self._work.wait(_LOOK_AGAIN_S)
            while self._may_begin():
                if time.monotonic() > self._until:  # the engine can recompute what is dropped
                    with self._table.lock:
                        blocks = len(queues.clear(number))
                    _log.warning(
                        "closing: no time to write blocks=%d tier=%s", blocks, self._tier.name
                    )
                    break
                if not self._begin_batch():
                    break
                try:
                    if not takes_writes(self._tier):
                        defer_queued(self._table, number)
                        break
                    self._write()
                except Exception:  # noqa: BLE001  # without this thread no block becomes evictable
                    _log.exception("blocks cannot be written tier=%s", self._tier.name)
                finally:
                    self.batches_ended = self.batches_begun
        for pool in (self._sealers, self._ahead):
            if pool:
                pool.shutdown(wait=False)

    def _begin_batch(self) -> bool:
        """Count a batch that begins; return False if the writer was given up."""
        with self._work:
            self.batches_begun += not self._is_given_up
            return not self._is_given_up

    def _may_begin(self) -> bool:
        """Return whether to begin a batch now."""
        return not self._is_given_up and self.has_moves() and not self._waits_for_more()

    def _waits_for_more(self) -> bool:
        """Return whether to wait for a batch of the size that the tier prefers.

        Nothing waits once a faster tier is about to evict a block that is queued (`hurry`).
        """
        if not self._batch.wait_s or self._hurries or self._closing:
            return False
        table, number = self._table, self._number
        with table.lock:
            queues = table.queues
            row, waiting = queues.oldest(number), queues.length(number)
            if row is None:
                return False
            # Most blocks of a node have one size.
            nbytes = waiting * table.index.namespace(row).slot_bytes
        return self._batch_wait.goes_on(nbytes)

    def _may_move_from_below(self) -> bool:
        return self._table.clock.now() >= self._from_below_at

    def _write(self) -> None:
        table, number = self._table, self._number
        self._batch_wait.end()
        self._candidates.look()
        with table.lock:
            picked = self._pick()
            rows = [block.row for block in picked]
            table.pin(rows)
            table.queues.add_writing(number, len(rows))
            for row in rows:
                table.copies.begin_filling(row, number)
        try:
            self._write_groups(self._split(picked))
            self._candidates.look()
        finally:
            with table.lock:
                table.queues.add_writing(number, -len(rows))
                for block in picked:
                    table.copies.end_filling(block.row, number)
                    if block.reason is MoveReason.RENEWAL:
                        table.renewal_ended(block.row, number)
                table.unpin(rows)

    def _split(self, picked: Sequence[MovingBlock]) -> list[Sequence[MovingBlock]]:
        """Split a batch into groups; what is written as it is in memory stays together."""
        if any(block.encodes for block in picked):
            size = AHEAD_GROUP_BYTES
        elif any(block.is_staged for block in picked):
            size = STAGED_GROUP_BYTES
        else:
            return [picked]
        size = max(size, self._parallel.group_bytes_max)
        return list(groups_of(picked, size, lambda block: block.nbytes))

    def _write_groups(self, groups: Sequence[Sequence[MovingBlock]]) -> None:
        """Write groups, each of which is read and encoded while the previous one is written."""
        first, *rest = groups
        if not rest:
            self._write_group(self._prepare(first))
            return
        ahead = submit_or_run(self._ahead_thread(), self._prepare, first)
        try:
            for group in [*rest, None]:
                prepared = ahead.result()
                if group is not None:
                    ahead = submit_or_run(self._ahead, self._prepare, group)
                self._write_group(prepared)
        finally:
            wait([ahead])  # a slot must not be reused while it is read

    def _prepare(self, picked: Sequence[MovingBlock]) -> list[MovingBlock]:
        """Return blocks in the form in which the tier stores them, but for their seal."""
        return self._encode(self._mark_held(self._source.stage(picked)))

    def _ahead_thread(self) -> ThreadPoolExecutor | None:
        """Return the thread that prepares groups ahead; None if none can be started any more."""
        if self._ahead is None:
            try:
                self._ahead = workers(1, f"holdfast-to-{self._tier.name}-ahead")
            except ConfigError:
                if not self._closing:  # no new threads at interpreter exit: prepare in this one
                    raise
        return self._ahead

    def _write_group(self, encoded: Sequence[MovingBlock]) -> None:
        """Write blocks in the form in which the tier stores them, and publish them."""
        batch = self._reserve(encoded)
        try:
            sent = self._send(batch)
        except Exception:  # noqa: BLE001  # a tier may be third-party code
            _log.exception("writing failed tier=%s", self._tier.name)
            sent = [(Outcome.GONE, UNKNOWN_EPOCH)] * len(batch)
            self._free([block.put.place for block in batch if not block.held])
        self._publish(batch, self._flush_renewed(batch, sent))
        self._pace(encoded)

    def _flush_renewed(
        self, batch: Sequence[MovingBlock], sent: Sequence[tuple[Outcome, int]]
    ) -> list[tuple[Outcome, int]]:
        """Flush durable blocks that were written again; return the outcomes.

        Their old copies, which are flushed, are given up when the new ones are published. So a
        block that the medium did not flush counts as not written, and keeps its old copy.
        """
        written = [
            block.reason is MoveReason.RENEWAL and outcome is Outcome.OK
            for block, (outcome, _) in zip(batch, sent, strict=True)
        ]
        places = [block.put.place for block in compress(batch, written)]
        if not places or not isinstance(self._tier, Flushable):
            return list(sent)
        safe = iter(self._tier.flush(places))
        lost = [is_written and not next(safe) for is_written in written]
        if any(lost):
            _log.warning(
                "durable blocks not written again: no flush blocks=%d tier=%s",
                *(sum(lost), self._tier.name),
            )
            self._free([block.put.place for block in compress(batch, lost)])
        return [
            (Outcome.GONE, epoch) if is_lost else (outcome, epoch)
            for is_lost, (outcome, epoch) in zip(lost, sent, strict=True)
        ]

    def _publish(self, batch: Sequence[MovingBlock], sent: Sequence[tuple[Outcome, int]]) -> None:
        """Publish the blocks that were written, defer or do not admit the others."""
        table, number = self._table, self._number
        reach("write_behind_written")
        # If kept, a block that is corrupt in memory counts as held and cannot be saved again.
        damaged = {
            block.row
            for block, (outcome, _) in zip(batch, sent, strict=True)
            if outcome is Outcome.CORRUPT and self._source.is_damaged(block)
        }
        again = self._is_given_up or not takes_writes(self._tier)
        with table.lock:
            for block, (outcome, epoch) in zip(batch, sent, strict=True):
                row, place = block.row, block.put.place
                if row in damaged:
                    continue
                erased = block.erase_generation != table.erase_generation(block.domain)
                if erased or self._source.is_stale(block):
                    # During the write it was erased, dropped, quarantined or decoded into another
                    # slot. The tier freed the place of a failed write.
                    self._free([place] if outcome is Outcome.OK else [])
                    if not erased:
                        table.queues.rewrite(row, number)
                elif outcome is Outcome.OK and table.sealing.is_retired(block.domain, epoch):
                    self._free([place])
                    table.queues.enqueue(row, [number])
                elif outcome is Outcome.OK:
                    name = number, table.index.namespace(row), table.index.keys[row] or b""
                    if table.failed_remote.get(name, table.clock.now()) is Outcome.UNREADABLE:
                        # The tier kept a record that this host cannot open; a corrupt one it
                        # would have replaced.
                        table.queues.do_not_admit([row])
                    else:
                        table.failed_remote.forget(name)
                        nbytes = 0 if block.held else len(block.put.record)
                        table.publish_below(row, number, place, nbytes, epoch)
                        table.movement.count((block.source, number, block.reason), nbytes)
                        self._candidates.note_written(nbytes, block.reason)
                elif again:
                    table.queues.defer(BlockMove(row, number, block.reason))
                else:
                    table.queues.do_not_admit([row])

    def _pace(self, batch: Sequence[MovingBlock]) -> None:
        """Delay the next moves that need no memory by the time that the limit requires."""
        nbytes = sum(
            len(block.put.record)
            for block in batch
            if block.is_staged or block.reason is MoveReason.DEMOTION
        )
        if nbytes and self._bytes_per_s < math.inf:
            begin_s = max(self._from_below_at, self._table.clock.now())
            self._from_below_at = begin_s + nbytes / self._bytes_per_s

    def _send(self, batch: Sequence[MovingBlock]) -> list[tuple[Outcome, int]]:
        """Write what the tier lacks: directly if no block is sealed, else in parallel groups.

        Returns for each block the outcome and the epoch of the data key that sealed it:
        `UNKNOWN_EPOCH` if it is not sealed, or if another node sealed it.
        """
        new = [block for block in batch if not block.held]
        sealing, written = self._table.sealing, list[tuple[Outcome, int]]()
        if any(self._needs_seal(block) for block in new):
            if self._sealers is None:
                try:
                    name = f"holdfast-to-{self._tier.name}-sealed"
                    self._sealers = workers(self._parallel.groups, name)
                except ConfigError:
                    if not self._closing:  # no new threads at interpreter exit: seal in this one
                        raise
            nbytes = sum(len(block.put.record) for block in new)
            new = [
                block._replace(sealer=sealing.sealer(block.put.record, block.domain))
                if self._needs_seal(block)
                else block
                for block in new
            ]
            groups = groups_of(
                new, self._parallel.group_bytes(nbytes), lambda block: len(block.put.record)
            )
            sent = [submit_or_run(self._sealers, self._send_sealed, group) for group in groups]
            wait(sent)  # a slot must not be reused while it is read
            outcomes = [outcome for each in sent for outcome in each.result()]
            written = [
                (outcome, block.sealer.epoch if isinstance(block.sealer, Sealer) else block.epoch)
                for outcome, block in zip(outcomes, new, strict=True)
            ]
        elif new:
            outcomes = self._tier.write([block.put for block in new])
            written = [(out, block.epoch) for out, block in zip(outcomes, new, strict=True)]
        rest = iter(written)
        return [(Outcome.OK, UNKNOWN_EPOCH) if block.held else next(rest) for block in batch]

    def _send_sealed(self, group: Sequence[MovingBlock]) -> list[Outcome]:
        """Seal a group into this thread's staging buffer, then write it.

        Frees the places of blocks that cannot be sealed.
        """
        size = sum(len(block.put.record) for block in group)
        stage = self._stages.pop()
        try:
            if len(stage) < size:
                stage = aligned_buffer(size)
            memory, pairs = stage, list[tuple[TierPut, Outcome]]()
            with self._work_slots:
                for block in group:
                    put, sealer = block.put, block.sealer
                    if isinstance(sealer, Outcome):  # it needs no seal, or cannot be sealed
                        pairs.append((put, sealer))
                        continue
                    into, memory = memory[: len(put.record)], memory[len(put.record) :]
                    outcome = sealer.seal(put.record, into)
                    if block.erase_generation != self._table.erase_generation(block.domain):
                        outcome = Outcome.GONE
                    pairs.append((TierPut(put.place, into), outcome))
            self._free([put.place for put, outcome in pairs if outcome is not Outcome.OK])
            puts = [put for put, outcome in pairs if outcome is Outcome.OK]
            written = iter(self._tier.write(puts))
            return [next(written) if outcome is Outcome.OK else outcome for _, outcome in pairs]
        finally:
            self._stages.append(stage)

    def _pick(self) -> list[MovingBlock]:
        """Dequeue a batch, without places on a local tier. Call under the lock."""
        queues, number = self._table.queues, self._number
        batch, nbytes, to_encode, staged = list[MovingBlock](), 0, 0, 0
        from_below = self._may_move_from_below()
        while (
            len(batch) < self._batch.blocks
            and nbytes < self._batch.nbytes
            and to_encode < _ENCODED_BATCH_BYTES
            and staged < self._batch.staged_bytes
            and (move := queues.pop(number, from_below=from_below, turn=self.batches_begun))
        ):
            if move.row in self._table.copies.fillings(number):  # of a writer that was given up
                queues.defer(move)
                continue
            is_there = self._table.is_on(move.row, number)
            if is_there and move.reason is not MoveReason.RENEWAL:
                continue
            if not is_there and move.reason is MoveReason.RENEWAL:  # counted as evicted already
                move = move._replace(reason=MoveReason.REWRITE)
            if (block := self._source.find(move)) is not None:
                batch.append(block)
                nbytes += block.nbytes
                to_encode += block.nbytes if block.encodes else 0
                staged += block.nbytes if block.is_staged else 0
        return batch

    def _needs_seal(self, block: MovingBlock) -> bool:
        """Return whether a block is to be sealed before it is written."""
        return not block.is_ready and self._table.sealing.seals(block.domain)

    def _mark_held(self, picked: Sequence[MovingBlock]) -> list[MovingBlock]:
        """Note which of the picked blocks a shared tier has already: they need no encoding.

        Renewals are written although the tier has them.
        """
        if not picked or not isinstance(self._tier, Queryable):
            return list(picked)
        known = self._tier.known([block.put for block in picked])
        return [
            block._replace(held=True) if held and block.reason is not MoveReason.RENEWAL else block
            for block, held in zip(picked, known, strict=True)
        ]

    def _encode(self, picked: Sequence[MovingBlock]) -> list[MovingBlock]:
        """Encode the blocks that are to be encoded; leave out those that are damaged in memory."""
        index = self._table.index
        chosen = [block for block in picked if block.encodes and not block.held]
        if not chosen:
            return list(picked)
        encoded = iter(
            self._encoder.encode(
                [(block.put.record, index.namespace(block.row)) for block in chosen]
            )
        )
        batch = list[MovingBlock]()
        for block in picked:
            record = next(encoded) if block.encodes and not block.held else block.put.record
            if record is not None:
                batch.append(block._replace(put=block.put._replace(record=record)))
            elif not self._source.is_damaged(block):
                batch.append(block)
        return batch

    def _make_room(self, picked: Sequence[MovingBlock]) -> list[MovingBlock]:
        """Evict within the domains' quotas on this tier; return the blocks that fit them."""
        table, incoming, batch = self._table, Counter[bytes](), list[MovingBlock]()
        with table.lock:
            for block in picked:
                nbytes = incoming[block.domain] + len(block.put.record)
                if evict_below(table, block.domain, self._number, nbytes):
                    incoming[block.domain] = nbytes
                    batch.append(block)
                else:
                    table.queues.do_not_admit([block.row])
        return batch

    def _reserve(self, encoded: Sequence[MovingBlock]) -> list[MovingBlock]:
        """Return the blocks that fit the quotas, and for which the tier has a place.

        The lock is held until what the tier evicted has left the index: otherwise a drop or an
        eviction beside this frees places that the tier has just reserved for these blocks.
        A tier of another package may be slow, so it is asked before the lock is taken; until then
        `holding_frees` keeps such places.
        """
        tier, picked = self._local, self._make_room(encoded)
        if tier is None or not picked:
            return picked
        table, batch = self._table, list[MovingBlock]()
        with tier.holding_frees() if isinstance(tier, CheckedLocalTier) else table.lock:
            reserved = tier.reserve([len(block.put.record) for block in picked])
            capacity_bytes = tier.usage().capacity_bytes if reserved.dropped else 0
            with table.lock:
                for dropped in reserved.dropped:
                    table.forget(dropped, self._number, capacity_bytes)
                for block, place in zip(picked, reserved.places, strict=True):
                    if place == NOWHERE:
                        table.queues.do_not_admit([block.row])
                    else:
                        batch.append(block._replace(put=TierPut(place, block.put.record)))
        return batch

    def _free(self, places: Sequence[Place]) -> None:
        """Free places that were not written; nothing is reserved on a shared tier."""
        if self._local is not None:
            self._local.free(places)
