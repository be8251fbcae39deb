"""Which ranges of which segment objects a batch of reads takes; pure.

Records that follow each other in an object and in the batch are read together, in ranges of 8 MiB
and more: a store answers one range of several records faster than a request for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.limits import MIB
from holdfast.tiers.segments.index import RecordPosition

RANGE_BYTES = 8 * MIB
"""A range ends with the record that fills it to this size."""


class RangeRead(NamedTuple):
    """One range: the segment's number in the index, its first byte, and indices of the batch."""

    segment: int
    start: int
    indices: list[int]


def range_reads(
    positions: Sequence[RecordPosition | None], capacities: Sequence[int]
) -> Iterator[RangeRead]:
    """Yield the ranges for records at these positions, each with a buffer of a known capacity.

    Leaves out records without a position, and records that are longer than their buffers.
    """
    wanted = sorted(
        (position.segment, position.start, index)
        for index, position in enumerate(positions)
        if position is not None and position.nbytes <= capacities[index]
    )
    indices: list[int] = []
    number, begin, end = -1, 0, 0
    for segment, start, index in wanted:
        position = positions[index]
        assert position is not None  # noqa: S101  # filtered above
        if indices and (segment, start) == (number, end) and end - begin < RANGE_BYTES:
            indices.append(index)
        else:
            if indices:
                yield RangeRead(number, begin, indices)
            indices, number, begin = [index], segment, start
        end = start + position.nbytes
    if indices:
        yield RangeRead(number, begin, indices)
