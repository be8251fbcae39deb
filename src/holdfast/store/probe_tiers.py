"""Probe unmeasured tiers: time a small read, so that the first plan has an estimate.

The bytes are discarded. Shared tiers are not probed: what the index knows of them may be stale,
and the first request that reads from one measures it.
"""

from __future__ import annotations

import itertools

from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.store.core import StoreParts
from holdfast.tiers.base import Place, TierGet

BLOCKS = 8
"""Number of blocks read from a tier."""

_ROWS_LOOKED_AT = 4_096


def unmeasured_tiers(store: StoreParts) -> list[int]:
    """Return the numbers of local tiers that hold blocks and were never read from."""
    return [
        number
        for number, tier in enumerate(store.table.lower, start=1)
        if number not in store.table.shared
        and not store.estimates.reads(number)
        and tier.usage().records >= BLOCKS
    ]


def probe_tier(store: StoreParts, number: int) -> None:
    """Read a few blocks of one tier and record how long that took."""
    table = store.table
    with table.lock:
        column = table.index.places[number]
        rows: list[int] = []  # of one namespace
        for row in itertools.islice(table.index.rows(), _ROWS_LOOKED_AT):
            if column[row] < 0:
                continue
            if not rows or table.index.namespace(row) == table.index.namespace(rows[0]):
                rows.append(row)
            if len(rows) == BLOCKS:
                break
        if not rows or store.estimates.reads(number):
            return
        namespace = table.index.namespace(rows[0])
        size = namespace.record_bytes
        batch = [
            TierGet(
                Place(column[row]), table.index.keys[row] or b"", aligned_buffer(size), namespace
            )
            for row in rows
        ]
        table.pin(rows)
    outcomes = list[Outcome]()
    store.estimates.asked(number, len(batch) * size, namespace.domain)
    try:
        outcomes = table.lower[number - 1].read(batch)
    finally:
        arrived = outcomes.count(Outcome.OK) * size
        store.estimates.arrived(number, arrived, namespace.domain, of=len(batch) * size)
        with table.lock:
            table.unpin(rows)
