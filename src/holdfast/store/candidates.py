"""Demotion ahead of need: ask a local tier what it evicts next, and queue moves of it.

Durable blocks on the durable tier are written there again, up to a share of the tier.

The tier evicts inside `reserve`, which never waits for a move. So its writer asks ahead, for the
records that the next writes evict. If writes overtake the moves, the tier
evicts all the same, and the store counts what was dropped before it was moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from holdfast.limits import MIB
from holdfast.store.block_table import BlockTable
from holdfast.store.move_queues import MoveReason
from holdfast.tiers.base import Candidate, NamesCandidates

AHEAD_SHARE = 1 / 8
AHEAD_SHARE_MAX = 1 / 2
AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 256 * MIB, 4_096 * MIB
"""A tier is asked for what it evicts for a share of its capacity, within these bounds: for several
batches of writes, because moves take their time, and for at most `AHEAD_SHARE_MAX` of it."""

RENEWED_SHARE_MAX = 1 / 2
"""Maximum share of a tier's writes that are renewals of durable blocks, so that these blocks can
take at most about half of the tier. Beyond that, they are evicted like others."""

LOOKS_AHEAD = 4
"""How often a tier is asked again while the bytes that it was asked about are written."""

_URGENT_SHARE = 1 / 2
"""What leaves for the first half of these bytes is moved now, without a wait for a larger batch.
The rest is looked at again before it leaves."""


class CandidateWatch:
    """The candidates of one local tier; `look` is called by its writer only.

    `wake_writers` wakes the writers of all tiers, after moves were queued. It gets the numbers of
    tiers to which moves are queued that must be made before this tier evicts their source.
    """

    def __init__(
        self, table: BlockTable, number: int, wake_writers: Callable[[Collection[int]], None]
    ) -> None:
        self._table = table
        self._number = number
        tier = table.lower[number - 1]
        self._tier = tier if isinstance(tier, NamesCandidates) else None
        self._demotes = table.movement.demotes(number)
        self._keeps_durable = number == table.durable_tier
        self._wake_writers = wake_writers
        self._look_at = -math.inf
        """Bytes written to the tier by then it is asked again."""
        self._written = 0
        self._renewable = math.inf
        """Bytes that may be renewed: as many as were written for other reasons, within a bound."""
        self._leaving: dict[int, Candidate] = {}
        """By row, the candidates that were named last."""

    def note_written(self, nbytes: int, reason: MoveReason) -> None:
        """Count bytes that are written to the tier; renewals make no room and need none."""
        if reason is not MoveReason.RENEWAL:
            self._written += nbytes
            self._renewable += nbytes

    def look(self) -> None:
        """Ask the tier for candidates if it is time, and queue moves of those that a tier takes.

        Call it without the lock: the tier may be slow.
        """
        table, number = self._table, self._number
        is_needed = self._demotes or (self._keeps_durable and len(table.durable_marks))
        if self._tier is None or not is_needed or self._written < self._look_at:
            return
        capacity_bytes = self._tier.usage().capacity_bytes
        ahead = min(max(AHEAD_SHARE * capacity_bytes, AHEAD_BYTES_MIN), AHEAD_BYTES_MAX)
        ahead = int(min(ahead, AHEAD_SHARE_MAX * capacity_bytes))
        self._look_at = self._written + ahead // LOOKS_AHEAD
        candidates, queued = self._tier.candidates(ahead), False
        soon = self._tier.candidates(int(_URGENT_SHARE * ahead)) if self._demotes else []
        with table.lock:
            before, self._leaving = self._leaving, self._rows(candidates)
            for row in before.keys() - self._leaving.keys():
                if row < len(table.index.keys):
                    table.copies.stay(row, number)
            self._renewable = min(self._renewable, RENEWED_SHARE_MAX * ahead)
            for row in sorted(self._leaving, key=table.index.depths.__getitem__):
                size = table.index.stored_bytes(row, number)
                if (
                    self._keeps_durable
                    and size <= self._renewable
                    and table.is_durable(row)
                    and table.queues.renew(row, number)
                ):
                    self._renewable -= size
                else:
                    queued |= table.movement.demote(row, number)
                table.copies.begin_leaving(row, number)
            urgent = {
                target for row in self._rows(soon) for target in table.queues.targets_below(row)
            }
        if queued or urgent:
            self._wake_writers(urgent)

    def _rows(self, candidates: list[Candidate]) -> dict[int, Candidate]:
        """Return the candidates that the table lists at the same place, by row."""
        table, rows = self._table, dict[int, Candidate]()
        for candidate in candidates:
            row = table.index.find(candidate.namespace, candidate.key)
            if row >= 0 and table.copies.place(row, self._number) == candidate.place:
                rows[row] = candidate
        return rows
