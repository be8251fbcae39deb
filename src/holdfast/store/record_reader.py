"""Read records from a lower tier into host slots: verify, open and decode them.

An encoded record of known size is read into a staging buffer and decoded into its slot. One of
unknown size is read into the slot, and moved to a staging buffer first. A raw record is read into
its slot and stays there: no copy.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import CODEC_NONE, header_of_record
from holdfast.blocks.namespace import Namespace
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.failpoints import reach
from holdfast.limits import MIB
from holdfast.store.block_table import BlockTable
from holdfast.store.verify import verify_record, verify_to_decode
from holdfast.tiers.base import Place, TierGet
from holdfast.wire.remote.buffer_pool import copy_parts

STAGES_KEPT = 8
STAGE_BYTES_MAX = 16 * MIB
"""Longest staging buffer that is kept for the next read."""


class RecordForm(enum.Enum):
    """How records are wanted in memory: RAW for an engine, STORED for another node, as it is."""

    RAW = "raw"
    STORED = "stored"


class WantedRecord(NamedTuple):
    """A record to read: its place and key, the slot for it, and its size if the index knows it.

    `stored_bytes` is the size of the slot if it is not known.
    """

    place: Place
    key: bytes
    slot: memoryview
    stored_bytes: int


class ReadRecord(NamedTuple):
    """How the read of one record ended.

    `is_damaged`: it was read, but failed its check. `stored_bytes`: its size on the tier.
    `is_encoded`: the record in the slot is encoded.
    """

    outcome: Outcome
    is_damaged: bool = False
    stored_bytes: int = 0
    is_encoded: bool = False


class BufferStock:
    """Staging buffers that are kept for later use: `kept`, of at most `nbytes_max`. Thread-safe."""

    def __init__(self, kept: int, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._free: deque[memoryview] = deque(maxlen=kept)

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of at least `nbytes`, with undefined content; the caller owns it."""
        try:
            buffer = self._free.pop() if nbytes else memoryview(b"")
        except IndexError:
            buffer = memoryview(b"")
        return buffer if len(buffer) >= nbytes else aligned_buffer(nbytes)

    def give_back(self, buffer: memoryview) -> None:
        """Keep a buffer for a later `take`; the caller uses it no more."""
        if 0 < len(buffer) <= self._nbytes_max:
            self._free.append(buffer)


class RecordReader:
    """Reads records of the lower tiers of one store. Thread-safe."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._stages = BufferStock(STAGES_KEPT, STAGE_BYTES_MAX)

    def read(
        self, namespace: Namespace, tier: int, wanted: Sequence[WantedRecord], form: RecordForm
    ) -> list[ReadRecord]:
        """Read records into their slots; each is verified, and in the wanted form if it is OK.

        Records of a domain without a key here stay as they are stored. Raises what the tier raises.
        """
        table, lower, codec = self._table, self._table.lower[tier - 1], self._table.codecs[tier - 1]
        if namespace.domain not in table.hosts:
            form = RecordForm.STORED
        staged = form is RecordForm.RAW and tier not in table.shared
        sizes = [
            each.stored_bytes if staged and each.stored_bytes < len(each.slot) else 0
            for each in wanted
        ]
        stage, start_s = self._stages.take(sum(sizes)), time.perf_counter()
        try:
            batch, at = list[TierGet](), 0
            for each, size in zip(wanted, sizes, strict=True):
                into = stage[at : at + size] if size else each.slot
                batch.append(TierGet(each.place, each.key, into, namespace))
                at += size
            asked, arrived, failed = sum(each.stored_bytes for each in wanted), 0, True
            codec.asked(asked)
            try:
                found = lower.read(batch)
                failed = any(outcome is not Outcome.OK for outcome in found)
                arrived = _arrived(batch) if tier in table.shared else asked
            finally:
                codec.arrived(arrived, asked, failed=failed)
            reach("promotion_read")
            records = [
                self._unpack(get, each.slot, tier, form)
                if outcome is Outcome.OK
                else ReadRecord(outcome)
                for get, each, outcome in zip(batch, wanted, found, strict=True)
            ]
        finally:
            self._stages.give_back(stage)
        lengths = [len(each.slot) for each in wanted]
        shorter = [r.stored_bytes < n for r, n in zip(records, lengths, strict=True)]
        is_whole = all(record.outcome is Outcome.OK for record in records)
        if form is RecordForm.RAW and is_whole and len(set(shorter)) == 1:
            seconds = time.perf_counter() - start_s
            codec.delivered(sum(lengths), seconds, encoded=shorter[0])
        return records

    def _unpack(self, get: TierGet, slot: memoryview, tier: int, form: RecordForm) -> ReadRecord:
        """Verify and open a record where it was read, and decode it into its slot."""
        header = header_of_record(get.into)
        is_encoded = header is not None and header.codec != CODEC_NONE
        if is_encoded and form is RecordForm.RAW:
            outcome = verify_to_decode(self._table, get.into, get.key, get.namespace)
        else:
            outcome = verify_record(self._table, get.into, get.key, get.namespace, tier)
        if outcome is not Outcome.OK:
            return ReadRecord(outcome, outcome is not Outcome.UNREADABLE)
        if header is None or header.codec == CODEC_NONE:
            return ReadRecord(outcome, stored_bytes=len(slot))
        size = header.stored_bytes
        if form is RecordForm.STORED:
            return ReadRecord(outcome, stored_bytes=size, is_encoded=True)
        if get.into is slot:
            stage = self._stages.take(size)
            try:
                copy_parts([slot[:size]], [stage[:size]])
                outcome = self._table.codecs[tier - 1].decode(stage[:size], slot)
            finally:
                self._stages.give_back(stage)
        else:
            outcome = self._table.codecs[tier - 1].decode(get.into, slot)
        is_damaged = outcome not in (Outcome.OK, Outcome.UNREADABLE)
        return ReadRecord(outcome, is_damaged, stored_bytes=size)


def _arrived(batch: Sequence[TierGet]) -> int:
    """Return the stored bytes of records of a shared tier: the index does not know them."""
    headers = (header_of_record(get.into) for get in batch)
    return sum(header.stored_bytes for header in headers if header is not None)
