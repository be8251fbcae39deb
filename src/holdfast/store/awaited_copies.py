"""The blocks of a chain that a `sync` waits for: how many leading ones the durable tier has."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Self

from holdfast.blocks.namespace import Namespace
from holdfast.index.residency import NOT_HERE
from holdfast.store.copy_events import CopyEvent
from holdfast.store.core import StoreParts

LOOKED_AT_MAX = 1 << 10
"""Maximum blocks looked at in one hold of the store's lock."""


class AwaitedCopies:
    """The leading blocks of a chain, while they are copied to the durable tier.

    A look costs as much as was copied since the last one, however long the chain is, because many
    calls of `sync` may wait while the tier takes no writes. Within a `with` block, `changed` is set
    when the tier gets or loses a block of the chain. For one thread; takes the store's lock.
    `aged`: keys of blocks that the tier has and will delete too soon.
    """

    def __init__(
        self,
        store: StoreParts,
        namespace: Namespace,
        keys: Sequence[bytes],
        aged: Collection[bytes] = (),
    ) -> None:
        self._store = store
        self._tier = store.table.durable_tier
        self._namespace = namespace
        self._keys = keys
        self._own = frozenset(keys)
        self._queued = 0
        """Number of leading blocks that the round of `queue_some` has passed."""
        self.aged = aged
        self.kept = 0
        """Number of leading blocks that the tier had in the looks so far. A flush tells whether
        some of them have left it since."""
        self.changed = threading.Event()

    def __enter__(self) -> Self:
        with self._store.table.lock:
            self._store.table.copies.events.subscribe(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        with self._store.table.lock:
            self._store.table.copies.events.unsubscribe(self._note)

    def look(self) -> bool:
        """Go on to the first block that the tier lacks; return whether another tier holds it."""
        table, end = self._store.table, 0
        while end < len(self._keys):
            with table.lock:
                end = min(self.kept + LOOKED_AT_MAX, len(self._keys))
                for key in self._keys[self.kept : end]:
                    row = table.index.find(self._namespace, key)
                    if row == NOT_HERE or not table.copies.is_on(row, self._tier):
                        return row != NOT_HERE and table.index.fastest(row) >= 0
                    if self._is_unsafe(row, key):
                        return True
                    self.kept += 1
        return False

    def queue_all(self) -> None:
        """Queue the blocks that are held but neither on the tier nor on their way there.

        Those that the tier must write again are queued too.
        """
        self._queued = 0
        while not self.queue_some():
            pass

    def queue_some(self) -> bool:
        """As `queue_all` for the next `LOOKED_AT_MAX` blocks; return whether that ended a round."""
        table, missing, unsafe = self._store.table, list[int](), list[int]()
        with table.lock:
            begin = max(self._queued, self.kept)
            step = self._keys[begin : begin + LOOKED_AT_MAX]
            filling, held = table.copies.fillings(self._tier), 0
            for row, key in zip(table.index.find_all(self._namespace, step), step, strict=True):
                if row == NOT_HERE or table.index.fastest(row) < 0:
                    break
                held += 1
                if self._is_unsafe(row, key):
                    unsafe.append(row)
                elif not (
                    table.copies.is_on(row, self._tier)
                    or row in filling
                    or table.queues.is_queued_for(row, self._tier)
                ):
                    missing.append(row)
            table.queues.write_through(missing, [self._tier])
            self._store.durable_blocks.renew(unsafe)
            is_round_over = held < len(step) or begin + held == len(self._keys)
            self._queued = 0 if is_round_over else begin + held
        return is_round_over

    def _is_unsafe(self, row: int, key: bytes) -> bool:
        """Return whether the tier has a block that it must write again."""
        is_aged = key in self.aged and self._store.table.copies.is_on(row, self._tier)
        return is_aged or self._store.durable_blocks.is_unsafe(row)

    def _note(self, events: Sequence[CopyEvent]) -> None:
        tier, namespace, own = self._tier, self._namespace, self._own
        if any(
            event.tier == tier and event.key in own and event.namespace == namespace
            for event in events
        ):
            self.changed.set()
