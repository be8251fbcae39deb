"""Encode records on their way to one lower tier, into staging buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.codec.coded import DAMAGED, NOT_SHORTER
from holdfast.store.block_table import BlockTable
from holdfast.store.tier_codec import TierCodec


class RecordEncoder:
    """Encodes one group of records after another, while the group before it is written.

    Has two staging buffers, each as long as the raw records of the longest group.
    """

    def __init__(self, table: BlockTable, codec: TierCodec) -> None:
        self._table = table
        self._codec = codec
        self._stages = deque((memoryview(b""), memoryview(b"")))

    def wants(self, namespace: Namespace) -> bool:
        """Return whether the next record of a namespace is to be encoded."""
        return self._codec.wants(namespace)

    def encode(self, records: Sequence[tuple[memoryview, Namespace]]) -> list[memoryview | None]:
        """Return each record encoded, or as it is if that makes it no shorter.

        None for a record that does not verify. The encoded records are valid during the next call,
        and until the second one begins. Takes no lock: nothing may change the records during the
        call.
        """
        size = sum(len(record) for record, _ in records)
        self._stages.rotate()
        if len(self._stages[0]) < size:
            self._stages[0] = aligned_buffer(size)
        encoded, free = list[memoryview | None](), self._stages[0]
        for record, namespace in records:
            width = self._table.element_bytes(namespace)
            stored = self._codec.encode(record, namespace, free, width)
            if stored > NOT_SHORTER:
                encoded.append(free[:stored])
                free = free[stored:]
            else:
                encoded.append(None if stored == DAMAGED else record)
        return encoded
