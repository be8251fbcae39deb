"""Probe unmeasured tiers: time a small read, so that the first plan has an estimate.

The bytes are discarded. Shared tiers are not probed: what the index knows of them may be stale,
and the first request that reads from one measures it.
"""

from __future__ import annotations

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.store.block_table import ROWS_AT_ONCE, BlockTable
from holdfast.store.core import StoreParts
from holdfast.tiers.base import Place, TierGet

BLOCKS = 8
"""Number of blocks read from a tier."""


def unmeasured_tiers(store: StoreParts) -> list[int]:
    """Return the numbers of local tiers that hold indexed blocks and were never read from."""
    return [
        number
        for number, tier in enumerate(store.table.lower, start=1)
        if number not in store.table.shared
        and not store.estimates.reads(number)
        and tier.usage().records >= BLOCKS
        and store.table.usage.used[number]
    ]


def probe_tier(store: StoreParts, number: int) -> None:
    """Read a few blocks of one tier and record how long that took."""
    if store.estimates.reads(number):
        return
    table = store.table
    rows, batch = _pin_some(table, number)
    if not rows:
        return
    size, domain = batch[0].namespace.slot_bytes, batch[0].namespace.domain
    outcomes = list[Outcome]()
    store.estimates.asked(number, len(batch) * size, domain)
    try:
        outcomes = table.lower[number - 1].read(batch)
    finally:
        arrived = outcomes.count(Outcome.OK) * size
        store.estimates.arrived(number, arrived, domain, of=len(batch) * size)
        with table.lock:
            table.unpin(rows)


def _pin_some(table: BlockTable, number: int) -> tuple[list[int], list[TierGet]]:
    """Pin the first blocks of one namespace that a tier holds; return their rows, and the reads."""
    index, column = table.index, table.index.places[number]
    with table.lock:
        end = len(index.keys)
    for at in range(0, end, ROWS_AT_ONCE):
        with table.lock:
            held = [row for row in range(at, min(at + ROWS_AT_ONCE, end)) if column[row] >= 0]
            if held:
                namespace = index.namespace(held[0])
                rows = [row for row in held if index.namespace(row) == namespace][:BLOCKS]
                batch = [
                    TierGet(
                        Place(column[row]),
                        index.keys[row] or b"",
                        aligned_buffer(namespace.slot_bytes),
                        namespace,
                    )
                    for row in rows
                ]
                table.pin(rows)
                return rows, batch
    return [], []
