"""Durable contexts: wait until blocks are on the durable tier and its medium has flushed them.

A save returns when its blocks are in memory; tiers below get them later. What must not be lost is
saved as `Retention.DURABLE` and then waited for with `sync`, as a file is written and then flushed
with `fsync`. A block that `sync` counted survives a crash of the process, of the machine, and a
loss of power, until the tier evicts it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError, Outcome
from holdfast.session import SECONDS_MAX, check_seconds
from holdfast.store.block_table import HOST, BlockTable
from holdfast.store.copy_events import CopyEvent
from holdfast.store.core import StoreParts
from holdfast.tiers.base import Flushable

_LOOK_AGAIN_S = 0.05


def sync(store: StoreParts, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> int:
    """Write what is held of a chain to the durable tier; return how many leading blocks it keeps.

    Blocks in memory that the tier lacks are queued for it, whatever its admission rule says; the
    domain's write budget still applies. Returns when all are written and flushed, or at the
    deadline. Raises BlockError if the store has no tier that can flush.
    """
    check_seconds("sync: deadline_s", deadline_s, SECONDS_MAX)
    began_s, number, table = store.clock.now(), store.durable_tier, store.table
    tier = table.lower[number - 1] if number else None
    if not isinstance(tier, Flushable):
        raise BlockError("sync: no tier of this store can flush its records; add a disk tier")
    changed = threading.Event()

    def note(_: Sequence[CopyEvent]) -> None:
        changed.set()

    with table.lock:
        table.copies.events.subscribe(note)
        others = set(range(1, len(table.lower) + 1)) - {number}
        rows = [row for row in table.index.find_all(namespace, keys) if row >= 0]
        here = [row for row in rows if table.is_on(row, HOST)]
        table.queues.write_through(here, skipped=others)
    try:
        store.mover.hurry()
        while True:
            with table.lock:
                kept, expected = _leading(table, namespace, keys, number)
            left_s = began_s + deadline_s - store.clock.now()
            if kept == expected or left_s <= 0:
                break
            changed.wait(min(left_s, _LOOK_AGAIN_S))
            changed.clear()
    finally:
        with table.lock:
            table.copies.events.unsubscribe(note)
    if kept and not tier.flush():
        kept = 0
    with table.lock:  # the tier may have evicted some during the flush
        kept = min(kept, _leading(table, namespace, keys, number)[0])
    outcome = Outcome.OK if kept == len(keys) else Outcome.LATE
    store.activity.call("sync", outcome, store.clock.now() - began_s, kept)
    return kept


def _leading(
    table: BlockTable, namespace: Namespace, keys: Sequence[bytes], tier: int
) -> tuple[int, int]:
    """Return how many leading blocks the tier holds, and how many it holds or may still get."""
    kept, expected = 0, 0
    for row in table.index.find_all(namespace, keys):
        if row < 0:
            break
        if table.copies.is_on(row, tier):
            kept += kept == expected
        elif not table.is_on(row, HOST):
            break
        expected += 1
    return kept, expected
