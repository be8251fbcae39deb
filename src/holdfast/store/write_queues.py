"""Blocks that wait to be written to lower tiers: one queue per tier, in order of arrival.

A block is *queued* for a tier, or *deferred* until an unreachable tier answers again, or *not
admitted*: no tier takes it, so it may be evicted without having been saved. Not thread-safe: the
store calls it under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence

from holdfast.store.admission_rules import AdmissionRules
from holdfast.store.copies import CopyTable


class WriteQueues:
    """The write queues of the lower tiers of one store, numbered from 1."""

    def __init__(self, copies: CopyTable, rules: AdmissionRules) -> None:
        self._copies = copies
        self._rules = rules
        tiers = copies.tiers - 1
        self._queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(tiers)]
        self._deferred: list[set[int]] = [set() for _ in range(tiers)]
        self._not_admitted: set[int] = set()
        self._ephemeral: set[int] = set()
        self._writing = [0] * tiers

    def __len__(self) -> int:
        """Return how many writes are queued or running, over all tiers."""
        return sum(map(len, self._queues)) + sum(self._writing)

    def length(self, tier: int) -> int:
        """Return how many blocks are queued for a tier."""
        return len(self._queues[tier - 1])

    def running(self, tier: int) -> int:
        """Return how many blocks are being written to a tier now."""
        return self._writing[tier - 1]

    def is_queued(self, row: int) -> bool:
        """Return whether a block is queued for some tier."""
        return any(row in queue for queue in self._queues)

    def is_admitted(self, row: int) -> bool:
        """Return False if the block may be evicted without having been saved."""
        return row not in self._not_admitted

    def enqueue(self, row: int, tiers: Sequence[int] = ()) -> bool:
        """Queue a block for those of `tiers` that admit it; False if none does.

        An empty `tiers` means every lower tier.
        """
        if not tiers and not self._rules.choosy:
            self.write_through([row])
            lower = range(1, self._copies.tiers)
            return self.is_queued(row) or any(self._copies.is_on(row, tier) for tier in lower)
        wanted = False
        for tier in tiers or range(1, self._copies.tiers):
            queue = self._queues[tier - 1]
            if row not in queue and not self._copies.is_on(row, tier):
                if not self._rules.admits(row, tier):
                    continue
                self._queue(row, tier)
            wanted = True
        return wanted

    def write_through(self, rows: Sequence[int], skipped: Container[int] = ()) -> None:
        """Queue blocks for every lower tier without them, regardless of its admission rule.

        `skipped`: tiers that do not get them. The write budget of the domain still applies.
        """
        for row in rows:
            for tier, queue in enumerate(self._queues, start=1):
                missing = row not in queue and not self._copies.is_on(row, tier)
                if missing and tier not in skipped and self._rules.affords(row, tier):
                    self._queue(row, tier)

    def rewrite(self, row: int, tier: int) -> None:
        """Queue a block for a tier that admitted it before."""
        self._queue(row, tier)

    def pop(self, tier: int) -> int:
        """Remove the oldest block from a tier's queue and return it; -1 if the queue is empty."""
        queue = self._queues[tier - 1]
        return queue.popitem(last=False)[0] if queue else -1

    def clear(self, tier: int) -> list[int]:
        """Empty a tier's queue; return the blocks that were in it, oldest first."""
        rows = list(self._queues[tier - 1])
        self._queues[tier - 1].clear()
        return rows

    def set_writing(self, tier: int, blocks: int) -> None:
        """Record how many blocks are being written to a tier now."""
        self._writing[tier - 1] = blocks

    def defer(self, row: int, tier: int) -> None:
        """Write a block when its tier answers again; until then it may be evicted."""
        self._deferred[tier - 1].add(row)
        self.do_not_admit([row])

    def deferred(self, tier: int) -> int:
        """Return how many blocks wait until a tier answers again."""
        return len(self._deferred[tier - 1])

    def resume(self, tier: int) -> None:
        """Queue the deferred blocks of a tier."""
        for row in self._deferred[tier - 1]:
            self._queue(row, tier)
        self._deferred[tier - 1].clear()

    def do_not_admit(self, rows: Iterable[int]) -> None:
        """Let blocks that are queued for no tier be evicted without having been saved."""
        self._not_admitted.update(row for row in rows if not self.is_queued(row))

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
        """Remove a block that left memory from all queues.

        A stalled tier must not let the queues grow without bound.
        """
        self._not_admitted.discard(row)
        self._ephemeral.discard(row)
        for queue in self._queues:
            queue.pop(row, None)
        for rows in self._deferred:
            rows.discard(row)

    def _queue(self, row: int, tier: int) -> None:
        """Queue a block for a tier; it must now be saved before it is evicted."""
        self._queues[tier - 1][row] = None
        self._not_admitted.discard(row)
        self._ephemeral.discard(row)
