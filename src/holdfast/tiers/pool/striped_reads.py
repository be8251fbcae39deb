"""Reads of striped segments: by lane, then by search, then rebuilt from the rest of a row.

    by lane     each block from the owner of its lane, all lanes concurrently
    by search   blocks that are not there: all members that may hold them are asked first
    rebuilt     blocks that no member holds, or whose member is late or gone: the parity record of
                their row and its other blocks are read, and the missing one is computed

The first reads get a part of the deadline, so that a late member leaves time to rebuild its blocks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.membership.members import Member
from holdfast.tiers.base import Place, TierGet
from holdfast.tiers.pool.chain_links import ChainLinks
from holdfast.tiers.pool.health import PoolHealth
from holdfast.tiers.pool.hedged_read import HedgeBudget
from holdfast.tiers.pool.lookup import SegmentLookup
from holdfast.tiers.pool.parity import (
    ROW_BLOCKS_MAX,
    ParityTable,
    parity_key,
    parity_namespace,
    read_parity,
    rebuild,
)
from holdfast.tiers.pool.pool_calls import PoolCalls
from holdfast.tiers.pool.segment_batch import (
    SegmentBatch,
    parts_by_lane,
    parts_of_gets,
)

FIRST_SHARE = 0.5
"""Share of a deadline for reads by lane: half of it is left to rebuild what is late."""

LATE_S_MIN = 0.25
LATE_FACTOR = 4.0
"""A member is late after this many times the 95th percentile of the members' reads, and at least
`LATE_S_MIN` seconds."""

SLOW_BYTES_PER_S = 32 * MIB
"""Rate at which a longer read gets more time before it is late: a fraction of 1 Gbit/s."""

ROWS_TRIED = 2
"""Rows that are tried for a block that is in several, because it was written again."""


class Lateness(NamedTuple):
    """When a member is late, so that its blocks are rebuilt: within the budget of hedges."""

    health: PoolHealth
    hedging: HedgeBudget

    def limit_s(self, nbytes: int) -> float:
        """Return the longest time of a read of `nbytes`; infinite if no hedge is allowed."""
        self.hedging.request()
        usual_s = self.health.hedge_after_s()
        if usual_s is None or not self.hedging.is_ready():
            return math.inf
        return max(LATE_S_MIN, LATE_FACTOR * usual_s) + nbytes / SLOW_BYTES_PER_S


class _Row(NamedTuple):
    """A row with a missing block: its namespace, place, first block and number of blocks.

    `holder` has its parity record.
    """

    namespace: Namespace
    place: Place
    first: bytes
    blocks: int
    holder: Member


class StripedReads:
    """Reads records of striped segments into their buffers. Thread-safe."""

    def __init__(
        self,
        lookup: SegmentLookup,
        links: ChainLinks,
        calls: PoolCalls,
        lateness: Lateness,
        deadline_s: float,
    ) -> None:
        self._lookup = lookup
        self._links = links
        self._calls = calls
        self._lateness = lateness
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self.rebuilt = 0
        """Blocks rebuilt since the start."""

    def read(self, batch: Sequence[TierGet]) -> list[Outcome]:
        """Read a batch; return an outcome for each."""
        begun = time.monotonic()
        outcomes, indices = [Outcome.LATE] * len(batch), list(range(len(batch)))
        late_s = self._lateness.limit_s(sum(len(get.into) for get in batch))
        first_s = min(FIRST_SHARE * self._deadline_s, late_s)
        self._by_lane(batch, indices, outcomes, begun + first_s)
        until = begun + self._deadline_s
        if first_s == late_s and Outcome.LATE in outcomes:
            self._lateness.hedging.take()
        misses = [index for index in indices if outcomes[index] is Outcome.MISS]
        self._by_search(batch, misses, outcomes, until)
        self._by_parity(batch, _missing(outcomes), outcomes, until)
        late = [index for index in indices if outcomes[index] is Outcome.LATE]
        self._by_search(batch, late, outcomes, until)
        if any(outcomes[index] is Outcome.OK for index in late):
            # Rows that lacked a late block beside a lost one lack one only now.
            self._by_parity(batch, _missing(outcomes), outcomes, until)
        return outcomes

    def _by_lane(
        self,
        batch: Sequence[TierGet],
        indices: Sequence[int],
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        """Read blocks from the owners of their lanes; of unknown position, they are a MISS.

        With one lane, all positions are alike.
        """
        lanes = self._lookup.lanes()
        blocks = [self._links.block(get.key) if lanes > 1 else 0 for get in batch]
        known = [index for index in indices if blocks[index] is not None]
        for index in indices:
            if blocks[index] is None:
                outcomes[index] = Outcome.MISS
        numbers = [block or 0 for block in blocks]
        parts = parts_by_lane(_parts(batch, known, until), lanes, numbers)
        self._calls.each(parts, lambda part: self._calls.read(part, batch, outcomes))

    def _by_search(
        self,
        batch: Sequence[TierGet],
        indices: Sequence[int],
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        """Ask all members that may hold these blocks, and read them from those that do."""
        asks: list[tuple[Member, SegmentBatch]] = [
            (member, part)
            for part in _parts(batch, indices, until)
            for member in self._lookup.holders(part.segment)
        ]
        holders = defaultdict[int, list[Member]](list)

        def ask(one: tuple[Member, SegmentBatch]) -> None:
            member, part = one
            namespace = batch[part.indices[0]].namespace
            keys = [batch[index].key for index in part.indices]
            held = self._calls.exist(member, part, namespace, keys).held
            for index, there in zip(part.indices, held, strict=True):
                if there:
                    holders[index].append(member)

        self._calls.each(asks, ask)
        found: dict[Member, list[int]] = {}
        for index, members in holders.items():
            found.setdefault(members[0], []).append(index)
        self._calls.each(
            [
                (member, part)
                for member, mine in found.items()
                for part in _parts(batch, mine, until)
            ],
            lambda one: self._calls.receive(one[0], one[1], batch, outcomes),
        )

    def _by_parity(
        self,
        batch: Sequence[TierGet],
        indices: Sequence[int],
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        """Rebuild blocks from the other blocks of their rows, where there is a parity record."""
        rows = self._rows_of(batch, indices, until)

        def rebuild_row(one: tuple[_Row, list[int]]) -> None:
            row, missing = one
            table = self._read_table(row, until)
            here = [i for i in missing if table and batch[i].key in _keys(table)]
            if table is not None and len(here) == 1 and outcomes[here[0]] is not Outcome.OK:
                self._rebuild(batch, here[0], row, table, outcomes, until)

        for tried in range(ROWS_TRIED):
            chosen: dict[_Row, list[int]] = {}
            for index, candidates in rows.items():
                if tried < len(candidates) and outcomes[index] is not Outcome.OK:
                    chosen.setdefault(candidates[tried], []).append(index)
            if chosen:
                self._calls.each(list(chosen.items()), rebuild_row)

    def _rows_of(
        self, batch: Sequence[TierGet], indices: Sequence[int], until: float
    ) -> dict[int, list[_Row]]:
        """Return for each block the rows that may protect it, the nearest first."""
        longest = min(self._lookup.stripe - 1, ROW_BLOCKS_MAX)
        shapes: dict[int, list[tuple[bytes, int]]] = {}
        for index in indices:  # the first block of a row, and how many it has
            run = self._links.run_to(batch[index].key, longest)
            shapes[index] = [
                (first, blocks)
                for before, first in enumerate(run)
                for blocks in range(before + 1, longest + 1)
            ]
        asks: list[tuple[Member, SegmentBatch, list[tuple[bytes, int]]]] = []
        for part in _parts(batch, indices, until):
            wanted = list(dict.fromkeys(each for i in part.indices for each in shapes[i]))
            holders = self._lookup.holders(part.segment)
            asks += [(member, part, wanted) for member in holders]
        holder_of: dict[tuple[Namespace, bytes, int], Member] = {}

        def ask(one: tuple[Member, SegmentBatch, list[tuple[bytes, int]]]) -> None:
            member, part, wanted = one
            namespace = batch[part.indices[0]].namespace
            names = [parity_key(first, blocks) for first, blocks in wanted]
            held = self._calls.exist(member, part, parity_namespace(namespace), names).held
            for (first, blocks), there in zip(wanted, held, strict=True):
                if there:
                    holder_of[namespace, first, blocks] = member

        self._calls.each(asks, ask)
        rows: dict[int, list[_Row]] = {}
        for index, candidates in shapes.items():
            namespace, place = batch[index].namespace, batch[index].place
            rows[index] = [
                _Row(namespace, place, first, blocks, holder_of[namespace, first, blocks])
                for first, blocks in candidates
                if (namespace, first, blocks) in holder_of
            ][:ROWS_TRIED]
        return rows

    def _read_table(self, row: _Row, until: float) -> ParityTable | None:
        """Read the parity record of a row; None if it is not there or does not verify."""
        hidden = parity_namespace(row.namespace)
        record = aligned_buffer(hidden.slot_bytes)
        key, outcomes = parity_key(row.first, row.blocks), [Outcome.MISS]
        gets = [TierGet(row.place, key, record, hidden)]
        self._calls.receive(row.holder, SegmentBatch(b"", [0], until), gets, outcomes)
        if outcomes[0] is not Outcome.OK:
            return None
        table = read_parity(record, row.first, row.blocks, row.namespace)
        if table is not None:
            self._links.note(_keys(table), table.depth)
        return table

    def _rebuild(
        self,
        batch: Sequence[TierGet],
        index: int,
        row: _Row,
        table: ParityTable,
        outcomes: list[Outcome],
        until: float,
    ) -> None:
        """Rebuild one block; reads the blocks of its row that are not in the batch already."""
        wanted = batch[index]
        others = {
            get.key: get.into
            for get, outcome in zip(batch, outcomes, strict=True)
            if outcome is Outcome.OK and get.namespace == row.namespace
        }
        size = row.namespace.slot_bytes
        gets = [
            TierGet(row.place, key, aligned_buffer(size), row.namespace)
            for key in _keys(table)
            if key not in others and key != wanted.key
        ]
        if gets:
            came = [Outcome.LATE] * len(gets)
            self._by_lane(gets, range(len(gets)), came, until)
            self._by_search(gets, _missing(came), came, until)
            others |= {g.key: g.into for g, c in zip(gets, came, strict=True) if c is Outcome.OK}
        if all(key in others for key in _keys(table) if key != wanted.key) and rebuild(
            table, wanted.key, others, row.namespace, wanted.into
        ):
            if outcomes[index] is not Outcome.LATE:
                self._calls.lost(row.namespace, [wanted.key])
            outcomes[index] = Outcome.OK
            with self._lock:
                self.rebuilt += 1


def _parts(batch: Sequence[TierGet], indices: Sequence[int], until: float) -> list[SegmentBatch]:
    """Return the parts of some gets of a batch, by segment and namespace."""
    chosen = parts_of_gets([batch[index] for index in indices], 0.0)
    return [
        SegmentBatch(part.segment, [indices[at] for at in part.indices], until) for part in chosen
    ]


def _missing(outcomes: Sequence[Outcome]) -> list[int]:
    return [index for index, outcome in enumerate(outcomes) if outcome is not Outcome.OK]


def _keys(table: ParityTable) -> list[bytes]:
    return [member.key for member in table.members]
