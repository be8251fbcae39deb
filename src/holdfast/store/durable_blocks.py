"""Durable blocks of a store: mark them, know which the durable tier lacks, and which tier it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.errors import ConfigError
from holdfast.status import DurableStatus
from holdfast.store.block_table import ROWS_AT_ONCE, BlockTable
from holdfast.tiers.base import NOWHERE, Flushable, LocalTier, Place, Tier

WAITING_MAX = 1 << 16
"""Maximum durable blocks that wait in the list. Later ones are queued too, but not counted; what is
missing of them enters the list when it has room."""

ROOM_SHARE = 0.25
"""Share of the list that must be free before blocks that it left out enter it."""

AGAIN_S = 5.0
"""Interval at which blocks that wait, but are in no queue, are queued again."""

_Name: TypeAlias = tuple[Namespace, bytes]


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


class BlockRounds:
    """Rounds over the blocks that are the keys of a dict, in steps of at most `ROWS_AT_ONCE`.

    Blocks may be added to the dict at any time, and are removed from it by `remove` only.
    """

    def __init__(self, blocks: dict[_Name, Any]) -> None:
        self._blocks = blocks
        self._at = 0
        """Number of leading blocks that the round has passed; 0: no round has begun."""

    @property
    def is_over(self) -> bool:
        """Whether the last step ended a round."""
        return not self._at

    def next_step(self) -> list[_Name]:
        """Return the next blocks of the round, oldest first; after its end those of a new one."""
        step = list(islice(self._blocks, self._at, self._at + ROWS_AT_ONCE))
        self._at += len(step)
        if self._at >= len(self._blocks):
            self._at = 0
        return step

    def remove(self, name: _Name) -> None:
        """Remove a block, if it is there; the round leaves out none of the others."""
        if self._blocks.pop(name, None) is not None:
            self._at = max(0, self._at - 1)


class DurableBlocks:
    """The durable blocks of a store, and those that the durable tier does not hold yet.

    State only: call under the store's lock. `for_s`: how long a mark lasts.
    """

    def __init__(self, table: BlockTable, for_s: float) -> None:
        self._table = table
        self._tier = table.durable_tier
        self._for_s = for_s
        self._since: dict[_Name, float] = {}
        """The list of blocks that wait, the oldest first."""
        self._waiting = BlockRounds(self._since)
        self._waiting_bytes = 0
        self._is_short = True
        """Whether marked blocks may wait that are not in the list: it was full, or the marks are of
        an earlier process."""
        self._unsafe: dict[_Name, Place] = {}
        """Blocks whose record at this place of a local tier is not known to be on the medium."""
        self._doubtful = BlockRounds(self._unsafe)
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

    def wait(self, rows: Iterable[int], now_s: float) -> bool:
        """Count rows as waiting from `now_s` on, as far as the durable tier does not keep them.

        Returns False if the list is full: then rows were left out of it, see `has_room_again`.
        """
        index, copies = self._table.index, self._table.copies
        return not self._tier or all(
            (copies.is_on(row, self._tier) and not self.is_unsafe(row))
            or self._add((index.namespace(row), index.keys[row] or b""), now_s)
            for row in rows
        )

    def has_room_again(self) -> bool:
        """Return, once, that the list has room for marked blocks that were left out of it.

        Also at the first call, for marks of an earlier process.
        """
        free = WAITING_MAX - len(self._since)
        has_room = self._is_short and free >= ROOM_SHARE * WAITING_MAX
        if has_room:
            self._is_short = False
        return has_room

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
                self._doubtful.remove(name)
                leading += leading == at
            elif self._is_local and len(self._unsafe) < WAITING_MAX:
                self._unsafe[name] = place
                if table.is_durable(row):
                    self._add(name, now_s)
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

        A failed write or flush, a full tier or a restart has taken them out of the queue. One call
        looks at `ROWS_AT_ONCE` blocks, and the next one goes on.
        """
        self._forget_safe(self._doubtful.next_step())
        if not self._since or now_s < self._again_at_s:
            return False
        names = self._waiting.next_step()
        if self._waiting.is_over:
            self._again_at_s = now_s + AGAIN_S
        self._forget_ended(names)
        table, tier = self._table, self._tier
        rows = [table.index.find(*name) for name in names if name in self._since]
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
        blocks that it evicted while they were marked, or that it alone had when it lost its drive.
        If more than `ROWS_AT_ONCE` blocks wait, some of them may have ended since the last round of
        `queue_again`.
        """
        if not self._tier:
            return None
        if len(self._since) <= ROWS_AT_ONCE:
            self._forget_ended(list(self._since))
        return DurableStatus(
            tier=self._table.tier_name(self._tier),
            marked=len(self._table.durable_marks),
            waiting=len(self._since),
            waiting_bytes=self._waiting_bytes,
            oldest_s=now_s - next(iter(self._since.values()), now_s),
            syncs=len(self._deadlines_s),
            deadline_s=max(0.0, min(self._deadlines_s, default=now_s) - now_s),
            lost=self._lost,
            evicted=self._table.durable_evicted,
        )

    def _add(self, name: _Name, now_s: float) -> bool:
        """Add a block to the list; return False if it is not there because the list is full."""
        if name not in self._since:
            if len(self._since) >= WAITING_MAX:
                self._is_short = True
                return False
            self._since[name] = now_s
            self._waiting_bytes += name[0].slot_bytes
        return True

    def _forget_safe(self, names: Iterable[_Name]) -> None:
        """Forget those of some unsafe records that left, or were written again."""
        for name in names:
            row = self._table.index.find(*name)
            if row < 0 or not self.is_unsafe(row):
                self._doubtful.remove(name)

    def _forget_ended(self, names: Iterable[_Name]) -> None:
        """Forget those of some blocks that no longer wait: the durable tier or no tier has them."""
        index, copies = self._table.index, self._table.copies
        for name in names:
            row = index.find(*name)
            is_lost = row < 0 or index.fastest(row) < 0
            if is_lost or (copies.is_on(row, self._tier) and not self.is_unsafe(row)):
                self._waiting.remove(name)
                self._waiting_bytes -= name[0].slot_bytes
                self._lost += is_lost
