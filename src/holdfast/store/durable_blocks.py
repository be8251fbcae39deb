"""Durable blocks of a store: mark them, know which the durable tier lacks, and which tier it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.errors import ConfigError
from holdfast.status import DurableStatus
from holdfast.store.block_table import BlockTable
from holdfast.tiers.base import NOWHERE, Flushable, LocalTier, Place, Tier

WAITING_MAX = 1 << 16
"""Maximum durable blocks whose age is known; later ones are written too, but not counted."""

AGAIN_S = 5.0
"""Interval at which blocks that wait, but are in no queue, are queued again."""


def durable_tier(lower: Sequence[Tier], name: str) -> int:
    """Return the number of the durable tier: the named one, or the last that can flush; 0 if none.

    Raises ConfigError for a name of no tier, or of one that cannot flush.
    """
    numbers = {
        tier.name: number
        for number, tier in enumerate(lower, start=1)
        if isinstance(tier, Flushable)
    }
    if not name:
        return max(numbers.values(), default=0)
    if name not in numbers:
        raise ConfigError(
            f"durable: {name!r} is not a tier that can flush its records to a medium; name one of: "
            f"{', '.join(numbers) or 'none of these tiers can, so add a disk'}"
        )
    return numbers[name]


class DurableBlocks:
    """The durable blocks of a store, and those that the durable tier does not hold yet.

    State only: call under the store's lock. `for_s`: how long a mark lasts.
    """

    def __init__(self, table: BlockTable, for_s: float) -> None:
        self._table = table
        self._tier = table.durable_tier
        self._for_s = for_s
        self._since: dict[tuple[Namespace, bytes], float] = {}
        self._unsafe: dict[tuple[Namespace, bytes], Place] = {}
        """Blocks whose record at this place of a local tier is not known to be on the medium."""
        self._is_local = bool(self._tier) and isinstance(table.lower[self._tier - 1], LocalTier)
        self._again_at_s = -math.inf
        self._deadlines_s: list[float] = []
        """When each `sync` that waits gives up."""
        self._lost = 0

    def mark(self, namespace: Namespace, rows: Sequence[int], now_s: float) -> None:
        """Mark rows of a namespace as durable; those that the tier lacks wait from `now_s` on."""
        keys = self._table.index.keys
        self._table.durable_marks.add(namespace, [keys[row] or b"" for row in rows], self._for_s)
        self.wait(rows, now_s)

    def wait(self, rows: Iterable[int], now_s: float) -> None:
        """Count rows as waiting from `now_s` on, as far as the durable tier does not hold them."""
        index, copies = self._table.index, self._table.copies
        if not self._tier:
            return
        for row in rows:
            if len(self._since) >= WAITING_MAX:
                self._forget_ended()
            if not copies.is_on(row, self._tier) and len(self._since) < WAITING_MAX:
                self._since.setdefault((index.namespace(row), index.keys[row] or b""), now_s)

    def note_flushed(
        self, rows: Sequence[int], places: Sequence[Place], safe: Sequence[bool], now_s: float
    ) -> int:
        """Note what a flush has made safe, of records that were at these places when it began.

        Returns how many leading rows are safe. Records that are not safe are to be written again
        (`renew`). Until then those of marked blocks wait.
        """
        copies, index, table, leading = self._table.copies, self._table.index, self._table, 0
        for at, (row, place, is_safe) in enumerate(zip(rows, places, safe, strict=True)):
            if row < 0 or place == NOWHERE or copies.place(row, self._tier) != place:
                continue  # it was evicted during the flush, and perhaps written again
            name = index.namespace(row), index.keys[row] or b""
            if is_safe:
                self._unsafe.pop(name, None)
                leading += leading == at
            elif self._is_local and len(self._unsafe) < WAITING_MAX:
                self._unsafe[name] = place
                if table.is_durable(row) and len(self._since) < WAITING_MAX:
                    self._since.setdefault(name, now_s)
        return leading

    def is_unsafe(self, row: int) -> bool:
        """Return whether the tier's record of a block is not known to be on the medium."""
        if not self._unsafe:
            return False
        index = self._table.index
        place = self._unsafe.get((index.namespace(row), index.keys[row] or b""), NOWHERE)
        return place != NOWHERE and place == self._table.copies.place(row, self._tier)

    def renew(self, rows: Iterable[int]) -> None:
        """Queue blocks whose record is not safe, to be written to another place and flushed."""
        for row in rows:
            if row not in self._table.copies.fillings(self._tier):
                self._table.queues.renew(row, self._tier)

    def queue_again(self, now_s: float) -> bool:
        """Queue blocks that wait and are in no queue, each `AGAIN_S`; return whether any is.

        A failed write or flush, a full tier or a restart has taken them out of the queue.
        """
        if not self._since or now_s < self._again_at_s:
            return False
        self._again_at_s = now_s + AGAIN_S
        self._forget_ended()
        table, tier = self._table, self._tier
        rows = [table.index.find(*name) for name in self._since]
        rows = [
            row
            for row in rows
            if not table.queues.is_queued_for(row, tier) and row not in table.copies.fillings(tier)
        ]
        table.queues.write_through(rows, [tier])
        self.renew(row for row in rows if self.is_unsafe(row))
        return bool(rows)

    def begin_sync(self, until_s: float) -> None:
        """Note that a `sync` waits, at most until this time."""
        self._deadlines_s.append(until_s)

    def end_sync(self, until_s: float) -> None:
        """Note that a `sync` with this deadline has ended."""
        self._deadlines_s.remove(until_s)

    def status(self, now_s: float) -> DurableStatus | None:
        """Return how many blocks wait, their bytes and the age of the oldest; None: no such tier.

        `lost`: blocks that were evicted or dropped before the durable tier had them. `evicted`:
        blocks that it evicted while they were marked.
        """
        if not self._tier:
            return None
        self._forget_ended()
        return DurableStatus(
            tier=self._table.tier_name(self._tier),
            marked=len(self._table.durable_marks),
            waiting=len(self._since),
            waiting_bytes=sum(namespace.slot_bytes for namespace, _ in self._since),
            oldest_s=now_s - next(iter(self._since.values()), now_s),
            syncs=len(self._deadlines_s),
            deadline_s=max(0.0, min(self._deadlines_s, default=now_s) - now_s),
            lost=self._lost,
            evicted=self._table.durable_evicted,
        )

    def _forget_ended(self) -> None:
        """Forget the blocks that no longer wait: held by the durable tier, or by no tier at all."""
        index, copies = self._table.index, self._table.copies
        for namespace, key in list(self._unsafe):
            row = index.find(namespace, key)
            if row < 0 or not self.is_unsafe(row):  # it left, or was written again
                del self._unsafe[namespace, key]
        for namespace, key in list(self._since):
            row = index.find(namespace, key)
            is_lost = row < 0 or index.fastest(row) < 0
            if is_lost or (copies.is_on(row, self._tier) and not self.is_unsafe(row)):
                del self._since[namespace, key]
                self._lost += is_lost
