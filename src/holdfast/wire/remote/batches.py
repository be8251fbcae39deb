"""Divide a batch between nodes into parts, one per connection, and parts into messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from holdfast.limits import MIB

SPLIT_BYTES = 8 * MIB
"""Minimum size of a batch that goes over several connections at once."""

BatchPart: TypeAlias = list[slice]
"""One connection's part of a batch: its messages in order, as slices of the batch."""


def parts_of_batch(sizes: Sequence[int], ways: int, message_bytes: int) -> list[BatchPart]:
    """Divide records of these sizes into up to `ways` parts of about equal bytes.

    A message has at most `message_bytes`, or one record.
    """
    total = sum(sizes)
    if total < min(SPLIT_BYTES, message_bytes):
        return [[slice(0, len(sizes))]] if sizes else []
    batch_parts: list[BatchPart] = [[] for _ in range(ways if total >= SPLIT_BYTES else 1)]
    start = batch_part = seen = message = 0
    for end, size in enumerate(sizes):
        own = min(seen * len(batch_parts) // total, len(batch_parts) - 1)
        if end > start and (own != batch_part or message + size > message_bytes):
            batch_parts[batch_part].append(slice(start, end))
            start, message = end, 0
        batch_part, seen, message = own, seen + size, message + size
    batch_parts[batch_part].append(slice(start, len(sizes)))
    return [batch_part for batch_part in batch_parts if batch_part]
