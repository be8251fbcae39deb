"""Rows of blocks that were written and have no parity record yet.

A row is complete when it has one block for each lane but one. A prompt fills most rows in one
write; a turn of a conversation, and the blocks that an engine generates one by one, fill them
later. A row that is not complete gets a parity record when it has been idle, or when the memory is
needed. Such records are bounded by a share of the bytes written, so write amplification is at most
1 + 1 / blocks of a row + `SHORT_SHARE`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from holdfast.blocks.envelope import Header
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.clock import Clock
from holdfast.limits import MIB
from holdfast.tiers.pool.parity import ParityRow, can_protect

MEMORY_BYTES = 128 * MIB
"""Most memory of open rows; the row that was idle longest is ended first."""

IDLE_S = 10.0
"""A row without a new block for this long is ended: longer than an engine takes for a block."""

SHORT_SHARE = 1 / 8
"""Bytes of parity records of incomplete rows per byte of blocks written."""

SAVED_BYTES_MAX = 256 * MIB
"""Most bytes of parity records that may be saved up for incomplete rows."""


class OpenRows:
    """The open rows of one process. Thread-safe: no row is used by two threads at once."""

    def __init__(
        self, clock: Clock, memory_bytes: int = MEMORY_BYTES, idle_s: float = IDLE_S
    ) -> None:
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._rows: OrderedDict[tuple[Namespace, bytes], tuple[float, ParityRow]] = OrderedDict()
        """By namespace and last block: when it grew last, and the row; the idlest first."""
        self._nbytes = 0
        self._short_bytes = 0.0

    def add(self, blocks: Sequence[tuple[Header, memoryview]], row_blocks: int) -> list[ParityRow]:
        """Add stored blocks, in chain order where they are of one chain; return the rows to end.

        `row_blocks`: number of blocks of a complete row. Keeps no record.
        """
        ended, row = list[ParityRow](), None
        for header, record in blocks:
            if not can_protect(namespace_of(header)):
                continue
            if row is None or not row.continues(header):
                self._put_back(row)
                row = self._take(header)
            if row is None:
                row = ParityRow(header, row_blocks)
            row.add(header, record)
            if len(row) >= row.blocks_max:
                ended.append(row)
                row = None
        self._put_back(row)
        with self._lock:
            nbytes = sum(len(record) for _, record in blocks)
            self._short_bytes = min(SAVED_BYTES_MAX, self._short_bytes + SHORT_SHARE * nbytes)
        return ended + self._end(lambda _: self._nbytes > self._memory_bytes)

    def idle(self) -> list[ParityRow]:
        """Remove and return rows to end because no block came for long."""
        return self._end(lambda since_s: self._clock.now() >= since_s + self._idle_s)

    def close(self) -> list[ParityRow]:
        """Remove and return all rows to end."""
        return self._end(lambda _: True)

    def _take(self, header: Header) -> ParityRow | None:
        """Remove and return the open row that a block continues, if there is one."""
        name = namespace_of(header), header.parent
        with self._lock:
            _, row = self._rows.get(name, (0.0, None))
            if row is None or not row.continues(header):
                return None
            del self._rows[name]
            self._nbytes -= row.nbytes
            return row

    def _put_back(self, row: ParityRow | None) -> None:
        if row is None:
            return
        name = row.namespace, row.last
        with self._lock:
            _, other = self._rows.pop(name, (0.0, None))
            self._nbytes += row.nbytes - (0 if other is None else other.nbytes)
            self._rows[name] = self._clock.now(), row

    def _end(self, ends: Callable[[float], bool]) -> list[ParityRow]:
        """Remove the idlest rows for which `ends` is true; return those to be protected."""
        ended = list[ParityRow]()
        with self._lock:
            while self._rows and ends(next(iter(self._rows.values()))[0]):
                _, (_, row) = self._rows.popitem(last=False)
                self._nbytes -= row.nbytes
                if row.nbytes <= self._short_bytes:
                    self._short_bytes -= row.nbytes
                    ended.append(row)
        return ended
