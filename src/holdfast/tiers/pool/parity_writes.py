"""Writes of parity records: after the blocks of their rows, to a member that has none of these.

A thread ends rows that have been idle, and tells members which parity records are in use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import header_of_record
from holdfast.clock import Clock
from holdfast.errors import Outcome
from holdfast.membership.members import Member
from holdfast.membership.poller import Poller
from holdfast.tiers.base import TierPut, segment_place
from holdfast.tiers.pool.lookup import SegmentLookup
from holdfast.tiers.pool.open_rows import OpenRows
from holdfast.tiers.pool.parity import ParityRow
from holdfast.tiers.pool.parity_uses import ParityUses
from holdfast.tiers.pool.pool_calls import PoolCalls
from holdfast.tiers.pool.segment_batch import SegmentBatch, segment_of

ROUND_S = 1.0
"""Interval at which idle rows are looked for, in seconds."""


class ParityWriteOptions(NamedTuple):
    """Deadline of a write in seconds, and number of blocks of a segment."""

    deadline_s: float
    segment_blocks: int


class ParityWrites(Poller):
    """Collects stored blocks in rows, and writes the parity records; owns the thread."""

    def __init__(
        self,
        clock: Clock,
        lookup: SegmentLookup,
        calls: PoolCalls,
        uses: ParityUses,
        options: ParityWriteOptions,
    ) -> None:
        super().__init__("parity records of a pool", ROUND_S, ROUND_S)
        self._lookup = lookup
        self._calls = calls
        self._uses = uses
        self._options = options
        self._rows = OpenRows(clock)
        self._lock = threading.Lock()
        self.written = self.written_bytes = self.refused = 0
        """Parity records that members stored, their bytes, and records that were not stored."""

    def add(self, batch: Sequence[TierPut], outcomes: Sequence[Outcome]) -> None:
        """Add the blocks of a batch that are stored; write the records of rows that end."""
        lanes = self._lookup.lanes()
        if lanes == 1:
            return
        stored = [
            (header, put.record)
            for put, outcome in zip(batch, outcomes, strict=True)
            if outcome is Outcome.OK and (header := header_of_record(put.record)) is not None
        ]
        self._write(self._rows.add(stored, lanes - 1))

    def end_all(self) -> None:
        """Write the parity records of all open rows."""
        self._write(self._rows.close())

    def _one_round(self) -> None:
        self._write(self._rows.idle())
        self._uses.tell(self._options.deadline_s)

    def _write(self, rows: Sequence[ParityRow]) -> None:
        until = time.monotonic() + self._options.deadline_s
        of_member: dict[Member, list[memoryview]] = {}
        for row in rows:
            # The lane before that of the first block has no block of the row.
            segment = segment_of(segment_place(row.segment))
            block = row.depth % self._options.segment_blocks - 1
            for member in self._lookup.route(segment, block=block).write:
                of_member.setdefault(member, []).append(row.record())

        def send(one: tuple[Member, list[memoryview]]) -> None:
            member, records = one
            outcomes = self._calls.send(member, SegmentBatch(b"", [], until), records)
            stored = [r for r, o in zip(records, outcomes, strict=False) if o is Outcome.OK]
            with self._lock:
                self.written += len(stored)
                self.written_bytes += sum(map(len, stored))
                self.refused += len(records) - len(stored)

        self._calls.each(list(of_member.items()), send)
