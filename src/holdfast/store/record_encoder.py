"""Encode records on their way to one lower tier, into a bounded staging buffer."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.coded import DAMAGED, NOT_SHORTER
from holdfast.limits import MIB
from holdfast.store.block_table import BlockTable
from holdfast.store.tier_codec import TierCodec

STAGE_BYTES = 32 * MIB
"""Raw bytes of the records that are encoded together, or one record if that is longer."""


class RecordEncoder:
    """Encodes the records of one batch after another, in the thread that writes them."""

    def __init__(self, table: BlockTable, codec: TierCodec) -> None:
        self._table = table
        self._codec = codec
        self._stage = memoryview(b"")

    def wants(self, namespace: Namespace) -> bool:
        """Return whether the next record of a namespace is to be encoded."""
        return self._codec.wants(namespace)

    def encode(self, records: Sequence[tuple[memoryview, Namespace]]) -> list[memoryview | None]:
        """Return each record encoded, or as it is if that makes it no shorter.

        None for a record that does not verify. The encoded records are valid until the next call.
        Takes no lock: nothing may change the records during the call.
        """
        size = sum(len(record) for record, _ in records)
        if len(self._stage) < size:
            self._stage = aligned_buffer(size)
        encoded, free = list[memoryview | None](), self._stage
        for record, namespace in records:
            width = self._table.element_bytes(namespace)
            stored = self._codec.encode(record, namespace, free, width)
            if stored > NOT_SHORTER:
                encoded.append(free[:stored])
                free = free[stored:]
            else:
                encoded.append(None if stored == DAMAGED else record)
        return encoded
