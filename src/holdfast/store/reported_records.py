"""Records that readers reported: check them without a key, delete damaged ones, doubt sealed ones.

A target cannot verify a sealed payload. A report about one is not proof: the reader may have
another key ring, or memory that flips bits. So such a record stays, and is *doubted*: a later put
of the same block replaces it, if it is sealed with the same data key or with one of a later epoch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.codec.coded import check_reported
from holdfast.errors import Outcome
from holdfast.store.core import StoreParts
from holdfast.store.verify import read_copy
from holdfast.tiers.base import Place

CHECK_S = 1.0
"""Longest time for which one report is checked, in seconds; the rest of it is ignored."""


def check_suspects(store: StoreParts, namespace: Namespace, keys: Sequence[bytes]) -> int:
    """Check every local copy of the blocks reported; return how many were damaged and deleted."""
    deleted, until = 0, time.monotonic() + CHECK_S
    for key in keys:
        if time.monotonic() > until:
            break
        for tier in range(1 + len(store.table.lower)):
            deleted += _check_copy(store, namespace, key, tier)
    return deleted


def _check_copy(store: StoreParts, namespace: Namespace, key: bytes, tier: int) -> bool:
    """Check one copy; return whether it was damaged, and is gone now."""
    table = store.table
    if tier in table.shared:
        return False
    with table.lock:
        row = table.index.find(namespace, key)
        place = table.copies.place(row, tier) if row >= 0 else Place(-1)
        if place < 0:
            return False
        table.pin([row])
    outcome, header = Outcome.MISS, None
    try:
        read, record = read_copy(table, row, tier, place)
        if read is Outcome.OK:
            outcome = check_reported(record, key, namespace)
        header = header_of_record(record)
    finally:
        with table.lock:
            there = table.copies.place(row, tier) == place
            if there and outcome is Outcome.CORRUPT:
                table.quarantine(row, tier, outcome)
            elif there and outcome is Outcome.UNREADABLE and header is not None:
                table.unverified_records.add(namespace, key, header)
            table.unpin([row])
    return there and outcome is Outcome.CORRUPT
