"""Parts of payloads: the byte ranges that one of several writers fills, and copies of slices.

A part is bytes: for each range its offset and length as u32, in ascending order. The empty part
stands for the whole payload.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from holdfast.blocks.layout import LayoutSlice, StateRun
from holdfast.errors import BlockError
from holdfast.limits import PART_RANGES_MAX

WHOLE = b""
"""The part of a writer that fills whole payloads alone."""

_RANGE = struct.Struct("<II")


def packed_part(ranges: Iterable[tuple[int, int]]) -> bytes:
    """Return the part of these ranges (offset, length)."""
    return b"".join(_RANGE.pack(*each) for each in ranges)


def check_part(part: bytes, raw_bytes: int) -> None:
    """Raise BlockError unless a part's ranges ascend, do not overlap, and lie in the payload."""
    if len(part) % _RANGE.size or len(part) > PART_RANGES_MAX * _RANGE.size:
        raise BlockError(
            f"part: {len(part)} bytes are not up to {PART_RANGES_MAX} ranges of {_RANGE.size} bytes"
        )
    end = 0
    for offset, nbytes in _RANGE.iter_unpack(part):
        if offset < end or not nbytes or offset + nbytes > raw_bytes:
            raise BlockError(
                f"part: bytes {offset} to {offset + nbytes} of a payload of {raw_bytes} follow "
                f"byte {end}; ranges must ascend, not be empty, and end within the payload"
            )
        end = offset + nbytes


@lru_cache(maxsize=1_024)
def overlaps(part: bytes, others: frozenset[bytes]) -> bool:
    """Return whether a part has a byte in common with any of the others."""
    ranges = sorted(_ranges({part, *others}))
    return part in others or any(stop > start for (_, stop), (start, _) in pairwise(ranges))


@lru_cache(maxsize=1_024)
def covers(parts: frozenset[bytes], raw_bytes: int) -> bool:
    """Return whether parts that do not overlap contain every byte of a payload."""
    return sum(stop - start for start, stop in _ranges(parts)) == raw_bytes


def _ranges(parts: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each range."""
    for part in parts:
        for offset, nbytes in _RANGE.iter_unpack(part):
            yield offset, offset + nbytes


class SliceCopy:
    """Copies one slice of each payload to a row of memory and back; without a slice, all of it.

    A row has the runs of the slice one after another. `part`: what `write` writes. It is WHOLE if
    that is the whole payload; `writes` is False if it is nothing.
    """

    def __init__(self, raw_bytes: int, layout_slice: LayoutSlice | None) -> None:
        self.row_bytes = raw_bytes
        self.part = WHOLE
        self.writes = True
        self._reads = self._written = [(0, 0, raw_bytes)]
        if layout_slice is None:
            return
        runs, written = layout_slice.runs(), layout_slice.written_runs()
        self.row_bytes = sum(run.nbytes for run in runs)
        self._reads = _copies(runs, runs)
        self._written = _copies(runs, written)
        self.writes = bool(written)
        if sum(run.nbytes for run in written) != raw_bytes:
            self.part = packed_part((offset, nbytes) for offset, _, nbytes in self._written)

    def read(self, payload: memoryview, row: memoryview) -> None:
        """Copy the slice of a payload to a row."""
        for offset, at, nbytes in self._reads:
            row[at : at + nbytes] = payload[offset : offset + nbytes]

    def write(self, row: memoryview, payload: memoryview) -> None:
        """Copy what this slice writes from a row to a payload."""
        for offset, at, nbytes in self._written:
            payload[offset : offset + nbytes] = row[at : at + nbytes]


def _copies(runs: list[StateRun], chosen: list[StateRun]) -> list[tuple[int, int, int]]:
    """Return offset in the payload, offset in the row, and length of each copy of chosen runs.

    `runs` are those of the row. Copies that continue each other on both sides are one.
    """
    at: dict[tuple[int, str], tuple[int, int]] = {}
    position = 0
    for run in runs:
        at[run.layer, run.state] = position, run.offset
        position += run.nbytes
    copies: list[tuple[int, int, int]] = []
    for run in chosen:
        row_start, payload_start = at[run.layer, run.state]
        row = row_start + run.offset - payload_start
        if copies:
            offset, before, nbytes = copies[-1]
            if (offset + nbytes, before + nbytes) == (run.offset, row):
                copies[-1] = offset, before, nbytes + run.nbytes
                continue
        copies.append((run.offset, row, run.nbytes))
    return copies
