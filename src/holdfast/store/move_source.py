"""Read blocks that are not in memory for a move to another lower tier, verified on the way.

Records are read into bounded staging buffers, so a move needs no slot in memory. Reads have a
lower priority than those of fetches and prestages. A sealed record is opened in a buffer of its own
to verify it, and moved as it is stored: sealed, and encoded if it is. A raw record that the target
wants encoded is moved plain, so that the target's writer encodes and seals it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from holdfast.blocks.envelope import CODEC_NONE, SEAL_NONE, Header, header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.failpoints import reach
from holdfast.fairness.fair_queue import Priority, WorkItem
from holdfast.fairness.fair_threads import FairThreads
from holdfast.limits import MIB
from holdfast.store.block_table import BlockTable
from holdfast.store.sealing import UNKNOWN_EPOCH
from holdfast.store.verify import verify_as_stored
from holdfast.tiers.base import Place, TierGet

READ_BYTES = 8 * MIB
"""Bytes read at once, and at most one record more: demand reads pass between such reads."""

_log = logging.getLogger("holdfast.store")


class WantedMove(NamedTuple):
    """A block to move: its row, its source, and the place there."""

    row: int
    source: int
    place: Place


class StagedRecord(NamedTuple):
    """A verified record in a staging buffer.

    `is_plain`: it is not sealed, so a sealed domain's must be. `encodes`: the target's writer is to
    encode it. `epoch`: that of the data key that sealed it.
    """

    record: memoryview
    header: Header
    is_plain: bool
    encodes: bool
    epoch: int


class MoveSource:
    """Reads blocks for the writer of one tier, one batch after another.

    `readers`: the threads that read from each lower tier.
    """

    def __init__(self, table: BlockTable, readers: Sequence[FairThreads]) -> None:
        self._table = table
        self._readers = readers
        self._stages = [memoryview(b""), memoryview(b"")]
        """Used in turns: what was read last is written while the next records are read."""
        self._opened = memoryview(b"")

    def read(
        self, wanted: Sequence[WantedMove], encodes: Callable[[Namespace], bool]
    ) -> list[StagedRecord | None]:
        """Read and verify pinned rows; None for each that cannot be moved.

        A copy that fails its check is quarantined, as on a fetch. The records are valid until
        the second next call, or `end`. Takes the lock only for moments.
        """
        sizes = [self._table.index.namespace(each.row).slot_bytes for each in wanted]
        stage = self._stages.pop(0)
        if len(stage) < sum(sizes):
            stage = aligned_buffer(sum(sizes))
        self._stages.append(stage)
        rest, gets = stage, list[TierGet]()
        for each, size in zip(wanted, sizes, strict=True):
            key = self._table.index.keys[each.row] or b""
            namespace = self._table.index.namespace(each.row)
            gets.append(TierGet(each.place, key, rest[:size], namespace, is_use=False))
            rest = rest[size:]
        outcomes = self._read(wanted, gets)
        reach("move_read")
        return [
            self._check(each, get, outcome, encodes)
            for each, get, outcome in zip(wanted, gets, outcomes, strict=True)
        ]

    def end(self) -> None:
        """Give the staging buffers back to the system; the records are used no more."""
        self._stages = [memoryview(b""), memoryview(b"")]
        self._opened = memoryview(b"")

    def _read(self, wanted: Sequence[WantedMove], gets: Sequence[TierGet]) -> list[Outcome]:
        """Read records on the threads of their tiers, in runs of `READ_BYTES`."""
        outcomes, at = list[Outcome](), 0
        for source, group in groupby(wanted, key=lambda each: each.source):
            until = at + len(list(group))
            while at < until:
                run, nbytes = list[TierGet](), 0
                while at < until and nbytes < READ_BYTES:
                    run.append(gets[at])
                    nbytes += len(gets[at].into)
                    at += 1
                outcomes += self._read_run(source, run, nbytes)
        return outcomes

    def _read_run(self, source: int, run: Sequence[TierGet], nbytes: int) -> list[Outcome]:
        tier, domain = self._table.lower[source - 1], run[0].namespace.domain
        share = self._table.usage.share(domain)
        item = WorkItem(domain, nbytes, share, Priority.MOVE, nbytes)
        try:
            return self._readers[source - 1].submit(item, partial(tier.read, run)).result()
        except RuntimeError:  # the store is closed
            return [Outcome.LATE] * len(run)
        except Exception:  # noqa: BLE001  # a tier may be third-party code
            _log.exception("reading failed tier=%s", tier.name)
            return [Outcome.GONE] * len(run)

    def _check(
        self,
        wanted: WantedMove,
        get: TierGet,
        outcome: Outcome,
        encodes: Callable[[Namespace], bool],
    ) -> StagedRecord | None:
        """Return a record that verifies; quarantine the copy otherwise."""
        table, header = self._table, None
        if outcome is Outcome.OK:
            header = header_of_record(get.into)
            if len(self._opened) < len(get.into):
                self._opened = aligned_buffer(len(get.into))
            outcome = verify_as_stored(table, get.into, get.key, get.namespace, self._opened)
        if outcome is not Outcome.OK or header is None:
            self._note_failed(wanted, get, outcome)
            return None
        record, is_ours = get.into[: header.stored_bytes], get.namespace.domain in table.hosts
        encode = is_ours and header.codec == CODEC_NONE and encodes(get.namespace)
        is_sealed = header.seal != SEAL_NONE
        if encode and is_sealed:
            record[:] = self._opened[: len(record)]
            is_sealed = False
        epoch = header.epoch if is_sealed and is_ours else UNKNOWN_EPOCH
        return StagedRecord(record, header, not is_sealed, encode, epoch)

    def _note_failed(self, wanted: WantedMove, get: TierGet, outcome: Outcome) -> None:
        table = self._table
        if table.sealing.is_away(get.namespace.domain):
            return
        with table.lock:
            if table.copies.place(wanted.row, wanted.source) == wanted.place:
                table.read_failed(wanted.row, wanted.source, outcome)
        shared = table.shared.get(wanted.source)
        if shared is not None and outcome in (Outcome.CORRUPT, Outcome.MISS):
            shared.delete_corrupt([get])
