"""Flush the file of a disk tier, and tell which records are on the medium.

After a failed flush the operating system may have dropped what was written, although it can still
be read from the page cache, and the next flush succeeds. So the records since the last good flush
are never safe again (`RegionLog.end_flush`). Records of an earlier process, which may have met such
a failure, are safe once they were read and verified: opening the file has dropped its page cache.
Sealed records cannot be verified without a key, so of them only the first sector is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

from holdfast.blocks.envelope import SEAL_NONE, header_of_record, read_header
from holdfast.buffers import ALIGNMENT, aligned_buffer
from holdfast.codec.pack import check_without_key
from holdfast.errors import Outcome
from holdfast.tiers.base import Place
from holdfast.tiers.disk.extent_io import CALL_BYTES_MIN, ByteSpan, Extents, transfer
from holdfast.tiers.disk.region_log import ListedRecord, RegionLog
from holdfast.tiers.gate import MediumGate

READ_AT_ONCE = 8
"""Records of an earlier process that are read and verified at a time."""

InCall: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes what runs in a `with` block one call of the drive, which hangs if it takes too long."""


class FlushResult(NamedTuple):
    """For each place whether its record is safe; the error of the flush."""

    safe: list[bool]
    failed: OSError | None


class VerifyResult(NamedTuple):
    """How many leading places are done, see `tiers.base.VerifiesRecovered`; the errors of reads."""

    done: int
    failed: Sequence[OSError]


class RecordFlush:
    """The flushes of one disk tier. Thread-safe.

    `mutex` protects `regions`. One flush runs at a time: the kernel reports failed writes to only
    one of two. A flush serves all callers that came before it began.
    """

    def __init__(
        self,
        extents: Extents,
        regions: RegionLog,
        mutex: threading.Lock,
        readers: ThreadPoolExecutor,
        gate: MediumGate,
    ) -> None:
        self._extents = extents
        self._regions = regions
        self._mutex = mutex
        self._readers = readers
        self._gate = gate
        self._flushing = threading.Lock()
        self._begun = self._good = 0
        """Flushes begun since the start, and the number of the last one that succeeded."""

    def flush(self, places: Sequence[Place], in_call: InCall) -> FlushResult:
        """Flush what was written before the call. The caller has entered the gate."""
        with self._mutex:
            lives = [self._regions.life_at(place) for place in places]
            begun = self._begun
        with self._flushing, in_call():
            error = self._flush_extents() if self._good <= begun else None
        if error is not None:
            return FlushResult([False] * len(places), error)
        with self._mutex:
            safe = [
                life is not None and self._regions.is_safe(place, life)
                for place, life in zip(places, lives, strict=True)
            ]
        return FlushResult(safe, None)

    def verify_recovered(
        self, places: Sequence[Place], within_s: float, in_call: InCall
    ) -> VerifyResult:
        """Read and verify records of an earlier process, `READ_AT_ONCE` in one call of the drive.

        The caller has entered the gate. Records that cannot be verified stay unsafe.
        """
        errors, until_s = list[OSError](), time.monotonic() + within_s
        for at in range(0, len(places), READ_AT_ONCE):
            with self._mutex:
                found = map(self._regions.to_prove, places[at : at + READ_AT_ONCE])
                wanted = [listed for listed in found if listed is not None]
            if not wanted:
                continue
            if self._gate.is_shut or time.monotonic() >= until_s:
                return VerifyResult(at, errors)
            with in_call():
                heads, failed = self._read(wanted, [ALIGNMENT] * len(wanted))
                unsealed = [
                    listed for listed in wanted if _may_be_verified(heads.get(listed.place))
                ]
                records, failed_records = self._read(
                    unsealed, [listed.extent.nbytes for listed in unsealed]
                )
            errors += failed + failed_records
            for listed in unsealed:
                record = records.get(listed.place)
                if record is not None and _is_intact(record, listed):
                    with self._mutex:
                        self._regions.prove(listed)
        return VerifyResult(len(places), errors)

    def _flush_extents(self) -> OSError | None:
        with self._mutex:
            self._begun += 1
            self._regions.begin_flush()
        error: OSError | None = None
        try:
            self._extents.flush()
            self._good = self._begun
        except OSError as failure:
            error = failure
        with self._mutex:
            self._regions.end_flush(failed=error is not None)
        return error

    def _read(
        self, wanted: Sequence[ListedRecord], sizes: Sequence[int]
    ) -> tuple[dict[Place, memoryview], list[OSError]]:
        """Read the first bytes of each record; return by place what was read, and the errors."""
        buffers = [aligned_buffer(size) for size in sizes]
        spans = [
            ByteSpan(listed.extent.offset, buffer, i)
            for i, (listed, buffer) in enumerate(zip(wanted, buffers, strict=True))
        ]
        failed = transfer(self._readers, 1, spans, self._extents.read, CALL_BYTES_MIN)
        read = {
            listed.place: buffer
            for i, (listed, buffer) in enumerate(zip(wanted, buffers, strict=True))
            if i not in failed
        }
        return read, list(failed.values())


def _may_be_verified(head: memoryview | None) -> bool:
    """Return whether the first sector of a record begins with a header without a seal."""
    header = None if head is None else header_of_record(head)
    return header is not None and header.seal == SEAL_NONE


def _is_intact(record: memoryview, listed: ListedRecord) -> bool:
    """Return whether a record that was read is the listed one, not sealed, and complete."""
    if check_without_key(record, listed.key, listed.namespace) is not Outcome.OK:
        return False
    return read_header(record)[1] == listed.extent.life.generation
