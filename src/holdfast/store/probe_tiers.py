"""Probe unmeasured tiers: time a small read, so that the first plan has an estimate.

The records are verified and decoded as for a fetch, so that the estimate includes it; then they are
discarded. Shared tiers are not probed: what the index knows of them may be stale,
and the first request that reads from one measures it.
"""

from __future__ import annotations

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.store.block_table import ROWS_AT_ONCE, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.record_reader import ReadRecord, RecordForm, RecordReader, WantedRecord
from holdfast.tiers.base import Place

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
    rows, wanted = _pin_some(table, number)
    if not rows:
        return
    namespace = table.index.namespace(rows[0])
    asked, records = len(wanted) * namespace.slot_bytes, list[ReadRecord]()
    store.estimates.asked(number, asked, namespace.domain)
    try:
        records = RecordReader(table).read(namespace, number, wanted, RecordForm.RAW)
    finally:
        arrived = sum(record.outcome is Outcome.OK for record in records) * namespace.slot_bytes
        store.estimates.arrived(number, arrived, namespace.domain, of=asked)
        with table.lock:
            table.unpin(rows)


def _pin_some(table: BlockTable, number: int) -> tuple[list[int], list[WantedRecord]]:
    """Pin the first blocks of one namespace that a tier holds; return their rows, and the reads."""
    index, column = table.index, table.copies.places(number)
    with table.lock:
        end = len(index.keys)
    for at in range(0, end, ROWS_AT_ONCE):
        with table.lock:
            held = [row for row in range(at, min(at + ROWS_AT_ONCE, end)) if column[row] >= 0]
            if held:
                namespace = index.namespace(held[0])
                rows = [row for row in held if index.namespace(row) == namespace][:BLOCKS]
                wanted = [
                    WantedRecord(
                        Place(column[row]),
                        index.keys[row] or b"",
                        aligned_buffer(namespace.slot_bytes),
                        index.stored_bytes(row, number),
                    )
                    for row in rows
                ]
                table.pin(rows)
                return rows, wanted
    return [], []
