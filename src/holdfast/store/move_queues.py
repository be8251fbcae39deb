"""Moves that wait: one queue per lower tier, with a reason for each move.

A move makes a copy of a block on its target from the copy on another tier. A block is *queued* for
a tier, or *deferred* until an unreachable tier answers again, or *not admitted*: no tier takes it,
so it may be evicted from memory without having been saved. Not thread-safe: the store calls it
under its lock.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.copies import CopyTable

BELOW_FIRST = 4
"""Of this many batches one begins with blocks that need not be in memory, so that they do not
starve; the others begin with what is in memory, which waits there for its copy."""

FROM_BELOW_MAX = 1 << 16
"""Maximum moves to one tier, of blocks that left memory, that wait."""

_HOST = 0


class MoveReason(enum.Enum):
    """Why a block moves.

    SAVE: it was saved. REWRITE: its copy on the target was lost. PROMOTION: it was fetched from a
    slower tier. DEMOTION: a faster tier will evict it. RENEWAL: it is durable, and the target will
    evict it. PRESTAGE: its use was announced, so it moves to memory before.
    """

    SAVE = "save"
    REWRITE = "rewrite"
    PROMOTION = "promotion"
    DEMOTION = "demotion"
    RENEWAL = "renewal"
    PRESTAGE = "prestage"


class BlockMove(NamedTuple):
    """A copy to be made: of a row, on a lower tier, for a reason.

    Its source is chosen when it is made: the fastest tier that holds the block then.
    """

    row: int
    target: int
    reason: MoveReason


class MoveQueues:
    """The moves to each lower tier of one store, numbered from 1.

    `on_save`: the tiers that get blocks soon after their save. The others get them when memory or
    a faster tier evicts them.
    """

    def __init__(self, copies: CopyTable, rules: AdmissionRules, on_save: Sequence[int]) -> None:
        self._copies = copies
        self._rules = rules
        self._on_save = on_save
        tiers = copies.tiers - 1
        self._queues: list[OrderedDict[int, MoveReason]] = [OrderedDict() for _ in range(tiers)]
        self._below: list[OrderedDict[int, MoveReason]] = [OrderedDict() for _ in range(tiers)]
        """Moves of blocks that need not be in memory."""
        self._deferred: list[dict[int, MoveReason]] = [{} for _ in range(tiers)]
        self._not_admitted: set[int] = set()
        self._ephemeral: set[int] = set()
        self._writing = [0] * tiers

    def __len__(self) -> int:
        """Return how many moves are queued or running, over all tiers."""
        waiting = sum(map(len, self._queues)) + sum(map(len, self._below))
        return waiting + sum(self._writing)

    def length(self, tier: int) -> int:
        """Return how many blocks are queued for a tier."""
        return len(self._queues[tier - 1]) + len(self._below[tier - 1])

    def from_below(self, tier: int) -> int:
        """Return how many moves to a tier are queued of blocks that need not be in memory."""
        return len(self._below[tier - 1])

    def oldest(self, tier: int) -> int | None:
        """Return the row of the oldest move to a tier, blocks in memory first; None: none waits."""
        return next(iter(self._queues[tier - 1] or self._below[tier - 1]), None)

    def targets_below(self, row: int) -> list[int]:
        """Return the tiers to which a block that need not be in memory waits to be moved."""
        return [tier for tier, below in enumerate(self._below, start=1) if row in below]

    def is_queued(self, row: int) -> bool:
        """Return whether a block in memory is queued for some tier."""
        return any(row in queue for queue in self._queues)

    def is_queued_for(self, row: int, tier: int) -> bool:
        """Return whether a block is queued for a tier, or deferred until it answers."""
        return (
            row in self._queues[tier - 1]
            or row in self._below[tier - 1]
            or row in self._deferred[tier - 1]
        )

    def is_admitted(self, row: int) -> bool:
        """Return False if the block may be evicted without having been saved."""
        return row not in self._not_admitted

    def save(self, row: int) -> None:
        """Queue a block that was saved for the tiers that get saves, and that admit it."""
        if not self._rules.choosy:
            self.write_through([row], self._on_save)
        elif self._on_save:
            self.enqueue(row, self._on_save)

    def enqueue(
        self, row: int, tiers: Sequence[int] = (), reason: MoveReason = MoveReason.SAVE
    ) -> bool:
        """Queue a block for those of `tiers` that admit it; False if none does.

        An empty `tiers` means every lower tier.
        """
        if not tiers and not self._rules.choosy:
            self.write_through([row])
            lower = range(1, self._copies.tiers)
            return self.is_queued(row) or any(self._copies.is_on(row, tier) for tier in lower)
        wanted = False
        for tier in tiers or range(1, self._copies.tiers):
            if row not in self._queues[tier - 1] and not self._copies.is_on(row, tier):
                if not self._rules.admits(row, tier):
                    continue
                self._queue(row, tier, reason)
            wanted = True
        return wanted

    def write_through(self, rows: Sequence[int], tiers: Sequence[int] | None = None) -> None:
        """Queue blocks for those of `tiers` without them, whatever their admission rules say.

        None: every lower tier. The write budget of the domain still applies.
        """
        for row in rows:
            in_memory = self._copies.is_on(row, _HOST)
            for tier in range(1, self._copies.tiers) if tiers is None else tiers:
                missing = row not in self._queues[tier - 1] and not self._copies.is_on(row, tier)
                may_wait = in_memory or self._may_wait_below(row, tier)
                if missing and may_wait and self._rules.affords(row, tier):
                    self._queue(row, tier, MoveReason.SAVE)

    def rewrite(self, row: int, tier: int) -> None:
        """Queue a block for a tier that admitted it before, if it is in memory."""
        if self._copies.is_on(row, _HOST):
            self._queue(row, tier, MoveReason.REWRITE)

    def demote(self, row: int, tier: int) -> bool:
        """Queue a block that a faster tier will evict, if the tier admits it."""
        if self.is_queued_for(row, tier):
            return True
        admitted = self._rules.admits(row, tier)
        if admitted:
            self._below[tier - 1][row] = MoveReason.DEMOTION
        return admitted

    def pop(self, tier: int, *, from_below: bool = True, turn: int = 1) -> BlockMove | None:
        """Remove the next move to a tier and return it; None if there is none.

        `from_below`: whether blocks that need not be in memory may be moved now. `turn` counts
        batches, see `BELOW_FIRST`.
        """
        queue, below = self._queues[tier - 1], self._below[tier - 1]
        if below and from_below and (not queue or turn % BELOW_FIRST == 0):
            queue = below
        if not queue:
            return None
        row, reason = queue.popitem(last=False)
        return BlockMove(row, tier, reason)

    def clear(self, tier: int) -> list[BlockMove]:
        """Remove all moves to a tier and return them, oldest first."""
        moves = list[BlockMove]()
        for queue in (self._queues[tier - 1], self._below[tier - 1]):
            moves += [BlockMove(row, tier, reason) for row, reason in queue.items()]
            queue.clear()
        return moves

    def add_writing(self, tier: int, blocks: int) -> None:
        """Count blocks that are being written to a tier from now on; negative: no longer."""
        self._writing[tier - 1] += blocks

    def running(self, tier: int) -> int:
        """Return how many blocks are being written to a tier now."""
        return self._writing[tier - 1]

    def defer(self, move: BlockMove) -> None:
        """Make a move when its target answers again; until then the block may be evicted."""
        self._deferred[move.target - 1][move.row] = move.reason
        self.do_not_admit([move.row])

    def deferred(self, tier: int) -> int:
        """Return how many blocks wait until a tier answers again."""
        return len(self._deferred[tier - 1])

    def resume(self, tier: int) -> None:
        """Queue the deferred moves to a tier."""
        for row, reason in self._deferred[tier - 1].items():
            self._queue(row, tier, reason)
        self._deferred[tier - 1].clear()

    def do_not_admit(self, rows: Iterable[int]) -> None:
        """Let blocks in memory that are queued for no tier be evicted without a copy below."""
        self._not_admitted.update(
            row for row in rows if self._copies.is_on(row, _HOST) and not self.is_queued(row)
        )

    def keep_in_memory_only(self, rows: Iterable[int]) -> None:
        """Write blocks to no lower tier, until `admit_ephemeral` or a queue takes them."""
        self._ephemeral.update(rows)
        self._not_admitted.update(rows)

    def admit_ephemeral(self, rows: Iterable[int]) -> list[int]:
        """Return those of some blocks that were to stay in memory only; they no longer are."""
        found = [row for row in rows if row in self._ephemeral]
        self._ephemeral.difference_update(found)
        self._not_admitted.difference_update(found)
        return found

    def left_memory(self, row: int) -> None:
        """Note that a block left memory: its moves use another tier's copy, if there is one.

        A stalled tier must not let the queues grow without bound: beyond `FROM_BELOW_MAX`, such
        moves are given up.
        """
        self._not_admitted.discard(row)
        self._ephemeral.discard(row)
        for at, queue in enumerate(self._queues):
            if row in queue:
                reason, below = queue.pop(row), self._below[at]
                if len(below) < FROM_BELOW_MAX and self._is_elsewhere(row, at + 1):
                    below[row] = reason
            deferred = self._deferred[at]
            if row in deferred and (
                len(deferred) > FROM_BELOW_MAX or not self._is_elsewhere(row, at + 1)
            ):
                del deferred[row]

    def forget(self, row: int) -> None:
        """Remove all moves of a row that names no block any more."""
        self.left_memory(row)
        for below in self._below:
            below.pop(row, None)

    def renew(self, row: int, tier: int) -> bool:
        """Queue a durable block that its tier will evict, to be written there again."""
        if self._may_wait_below(row, tier) and self._rules.affords(row, tier):
            self._below[tier - 1][row] = MoveReason.RENEWAL
        return row in self._below[tier - 1]

    def _may_wait_below(self, row: int, tier: int) -> bool:
        """Return whether a move of a block that is not in memory may be queued, and is not yet."""
        below = self._below[tier - 1]
        return row not in below and len(below) < FROM_BELOW_MAX

    def _is_elsewhere(self, row: int, target: int) -> bool:
        """Return whether a tier other than the target holds a block."""
        tiers = range(self._copies.tiers)
        return any(tier != target and self._copies.is_on(row, tier) for tier in tiers)

    def _queue(self, row: int, tier: int, reason: MoveReason) -> None:
        """Queue a move; a block in memory must now be saved before it is evicted."""
        if not self._copies.is_on(row, _HOST):
            self._below[tier - 1][row] = reason
            return
        self._below[tier - 1].pop(row, None)
        self._queues[tier - 1][row] = reason
        self._not_admitted.discard(row)
        self._ephemeral.discard(row)
