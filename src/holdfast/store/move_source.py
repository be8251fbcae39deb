"""Where a moving block's record comes from: its slot in memory, or another lower tier.

A block in memory is moved from its slot, in place. Any other is read from the fastest tier that
holds it into a bounded staging buffer, so that a move needs no slot in memory. These reads have a
lower priority than those of fetches and prestages, and each record is verified. A sealed record is
opened in a buffer of its own to verify it, and moved as it is stored: sealed, and encoded if it is.
A raw record that the target wants encoded is moved plain, so that the target's writer encodes and
seals it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from itertools import groupby
from typing import NamedTuple

from holdfast.blocks.envelope import (
    CODEC_NONE,
    SEAL_NONE,
    header_of_record,
    read_header,
    record_length,
)
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.seal import Sealer
from holdfast.errors import FormatError, Outcome
from holdfast.failpoints import reach
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.limits import MIB
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.move_queues import BlockMove, MoveReason
from holdfast.store.sealing import UNKNOWN_EPOCH
from holdfast.store.verify import is_damaged_in_memory, verify_as_stored
from holdfast.tiers.base import (
    NOWHERE,
    LocalTier,
    Place,
    TierGet,
    TierPut,
    is_away,
    segment_place,
)

READ_BYTES = 4 * MIB
"""Bytes read at once, and at most one record more: demand reads pass between such reads."""

_log = logging.getLogger("holdfast.store")


class MovingBlock(NamedTuple):
    """One block to be moved, from `place` on tier `source`.

    `put`: its record, empty until it is staged, and its place on the target. `nbytes`: the size of
    its record at its source, at most. `erase_generation` is its domain's at the start. `encodes`:
    it is to be encoded. `held`: a shared target has it already. `epoch`: that of its data key, if
    it is moved sealed as it is. `is_ready`: it is moved as it is stored at its source. `sealer`: OK
    if the block needs no seal, another outcome if it cannot be sealed.
    """

    row: int
    source: int
    place: Place
    put: TierPut
    nbytes: int
    domain: bytes
    erase_generation: int
    reason: MoveReason
    encodes: bool = False
    held: bool = False
    sealer: Sealer | Outcome = Outcome.OK
    epoch: int = UNKNOWN_EPOCH
    is_ready: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether it is read into a staging buffer, because it is not in memory."""
        return self.source != HOST


class MoveSource:
    """Finds and reads the blocks for the writer of lower tier `number`, one batch after another.

    `readers`: the threads that read from each lower tier. `encodes`: whether the target wants the
    blocks of a namespace encoded.
    """

    def __init__(
        self,
        table: BlockTable,
        number: int,
        readers: Sequence[FairThreads],
        encodes: Callable[[Namespace], bool],
    ) -> None:
        self._table = table
        self._number = number
        self._is_local = isinstance(table.lower[number - 1], LocalTier)
        self._readers = readers
        self._encodes = encodes
        self._stages = [memoryview(b""), memoryview(b"")]
        """Used in turns: what was read last is written while the next records are read."""
        self._opened = memoryview(b"")

    def find(self, move: BlockMove) -> MovingBlock | None:
        """Return a block and its best source; None if it cannot be read. Call under the lock.

        A copy in memory without a valid header is quarantined.
        """
        table, row = self._table, move.row
        namespace = table.index.namespace(row)
        generation = table.erase_generation(namespace.domain)
        if table.is_on(row, HOST):
            place = table.copies.place(row, HOST)
            record = table.host(namespace).view(place, namespace.slot_bytes)
            if row in table.encoded:  # another node encoded it: it is shorter than its slot
                record = record[: record_length(record)]
            try:
                header, _ = read_header(record)
            except FormatError:
                table.quarantine(row, HOST, Outcome.CORRUPT)
                return None
            return MovingBlock(
                row,
                HOST,
                place,
                TierPut(self._place(header.segment), record),
                len(record),
                namespace.domain,
                generation,
                move.reason,
                encodes=row not in table.encoded and self._encodes(namespace),
            )
        below = (t for t in table.index.tiers(row) if not is_away(table.lower[t - 1]))
        source = next(below, HOST)
        if source == HOST or table.sealing.is_away(namespace.domain):
            return None
        place, size = table.copies.place(row, source), namespace.slot_bytes
        put = TierPut(NOWHERE, memoryview(b""))
        return MovingBlock(row, source, place, put, size, namespace.domain, generation, move.reason)

    def stage(self, blocks: Sequence[MovingBlock]) -> list[MovingBlock]:
        """Read and verify the pinned blocks that are not in memory; leave out those that fail.

        A copy that fails its check is quarantined, as on a fetch. The records are valid until
        the second next call, or `end`. Takes the lock only for moments.
        """
        wanted = [block for block in blocks if block.is_staged]
        if not wanted:
            return list(blocks)
        stage = self._stages.pop(0)
        if len(stage) < (size := sum(block.nbytes for block in wanted)):
            stage = aligned_buffer(size)
        self._stages.append(stage)
        rest, gets = stage, list[TierGet]()
        for block in wanted:
            key = self._table.index.keys[block.row] or b""
            namespace = self._table.index.namespace(block.row)
            into, rest = rest[: block.nbytes], rest[block.nbytes :]
            gets.append(TierGet(block.place, key, into, namespace, is_use=False))
        outcomes = self._read(wanted, gets)
        reach("move_read")
        checked = map(self._check, wanted, gets, outcomes)
        staged = (next(checked) if block.is_staged else block for block in blocks)
        return [block for block in staged if block is not None]

    def is_stale(self, block: MovingBlock) -> bool:
        """Return whether a copy must not be published: the block was dropped, or its slot changed.

        Call under the lock. A copy on another lower tier may have been evicted since it was read.
        """
        table, row = self._table, block.row
        if not block.is_staged:
            return table.copies.place(row, HOST) != block.place
        return table.copies.fillings(self._number)[row].is_dropped

    def is_damaged(self, block: MovingBlock) -> bool:
        """Return whether a block that cannot be moved is corrupt in memory, where it goes then."""
        return not block.is_staged and is_damaged_in_memory(self._table, block.row)

    def end(self) -> None:
        """Give the staging buffers back to the system; the records are used no more."""
        self._stages = [memoryview(b""), memoryview(b"")]
        self._opened = memoryview(b"")

    def _place(self, segment: bytes) -> Place:
        """Return the place on the target of a block of a segment; a local tier chooses its own."""
        return NOWHERE if self._is_local else segment_place(segment)

    def _read(self, wanted: Sequence[MovingBlock], gets: Sequence[TierGet]) -> Iterator[Outcome]:
        """Read records on the threads of their tiers, in runs of `READ_BYTES`."""
        at = 0
        for source, group in groupby(wanted, key=lambda block: block.source):
            until = at + len(list(group))
            while at < until:
                run, nbytes = list[TierGet](), 0
                while at < until and nbytes < READ_BYTES:
                    run.append(gets[at])
                    nbytes += len(gets[at].into)
                    at += 1
                yield from self._read_run(source, run, nbytes)

    def _read_run(self, source: int, run: Sequence[TierGet], nbytes: int) -> list[Outcome]:
        tier, domain = self._table.lower[source - 1], run[0].namespace.domain
        share = self._table.usage.share(domain)
        item = WorkItem(domain, nbytes, share, Priority.MOVE, nbytes)
        late = [Outcome.LATE] * len(run)
        try:
            reading = self._readers[source - 1].submit(item, partial(tier.read, run))
        except RuntimeError:  # the store is closed
            return late
        try:
            return reading.result()
        except CancelledError:  # the store is being closed
            return late
        except Exception:  # noqa: BLE001  # a tier may be third-party code
            _log.exception("reading failed tier=%s", tier.name)
            return [Outcome.GONE] * len(run)

    def _check(self, block: MovingBlock, get: TierGet, outcome: Outcome) -> MovingBlock | None:
        """Return a block whose record verifies; quarantine the copy otherwise."""
        table, header = self._table, None
        if outcome is Outcome.OK:
            header = header_of_record(get.into)
            if len(self._opened) < len(get.into):
                self._opened = aligned_buffer(len(get.into))
            outcome = verify_as_stored(table, get.into, get.key, get.namespace, self._opened)
        if outcome is not Outcome.OK or header is None:
            self._note_failed(block, get, outcome)
            return None
        record, is_ours = get.into[: header.stored_bytes], block.domain in table.hosts
        encodes = is_ours and header.codec == CODEC_NONE and self._encodes(get.namespace)
        is_sealed = header.seal != SEAL_NONE
        if encodes and is_sealed:
            record[:] = self._opened[: len(record)]
            is_sealed = False
        return block._replace(
            put=TierPut(self._place(header.segment), record),
            encodes=encodes,
            epoch=header.epoch if is_sealed and is_ours else UNKNOWN_EPOCH,
            is_ready=is_sealed,
        )

    def _note_failed(self, block: MovingBlock, get: TierGet, outcome: Outcome) -> None:
        table = self._table
        if table.sealing.is_away(block.domain):
            return
        with table.lock:
            if table.copies.place(block.row, block.source) == block.place:
                table.read_failed(block.row, block.source, outcome)
        shared = table.shared.get(block.source)
        if shared is not None and outcome in (Outcome.CORRUPT, Outcome.MISS):
            shared.delete_corrupt([get])
