"""The part of a batch that belongs to one segment, and its deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.tiers.base import Place, TierGet, TierPut, chain_segments


class SegmentBatch(NamedTuple):
    """Indices into a batch of the records of one segment.

    However many members are asked, all work on it ends at `until`, in `time.monotonic()`. `block`:
    the number in the segment of one of its blocks; all are on the lane of this one.
    """

    segment: bytes
    indices: list[int]
    until: float
    block: int = 0

    @property
    def left_s(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self.until - time.monotonic())


def parts_of_puts(batch: Sequence[TierPut], seconds: float) -> list[SegmentBatch]:
    """Split a batch by segment."""
    return _parts([(put.place, None) for put in batch], seconds)


def parts_of_gets(batch: Sequence[TierGet], seconds: float) -> list[SegmentBatch]:
    """Split a batch by segment and namespace, because a message names one namespace."""
    return _parts([(get.place, get.namespace) for get in batch], seconds)


def _parts(groups: Sequence[tuple[Place, Namespace | None]], seconds: float) -> list[SegmentBatch]:
    until = time.monotonic() + seconds
    parts: dict[tuple[Place, Namespace | None], SegmentBatch] = {}
    for index, group in enumerate(groups):
        if group not in parts:
            parts[group] = SegmentBatch(segment_of(group[0]), [], until)
        parts[group].indices.append(index)
    return list(parts.values())


def parts_of_chain(
    keys: Sequence[bytes], start: int, segment_blocks: int, seconds: float
) -> list[SegmentBatch]:
    """Split the blocks of a chain from `start` on by segment."""
    until = time.monotonic() + seconds
    return [
        SegmentBatch(segment_of(place), list(blocks), until)
        for place, blocks in chain_segments(keys, start, segment_blocks)
    ]


def parts_by_lane(
    parts: Sequence[SegmentBatch], lanes: int, blocks: Sequence[int]
) -> list[SegmentBatch]:
    """Split parts by lane; `blocks` has the number in its segment of each record of the batch."""
    found = list[SegmentBatch]()
    for part in parts:
        of_lane: dict[int, SegmentBatch] = {}
        for index in part.indices:
            lane = blocks[index] % lanes
            if lane not in of_lane:
                of_lane[lane] = part._replace(indices=[], block=blocks[index])
            of_lane[lane].indices.append(index)
        found += of_lane.values()
    return found


def segment_of(place: Place) -> bytes:
    """Return the id by which a segment is placed: its own id shifted right by one bit, 63 bits."""
    return place.to_bytes(SEGMENT_BYTES, "little")


def names_of(records: Sequence[memoryview]) -> tuple[Namespace | None, list[bytes]]:
    """Return the keys of records, and their namespace if they have one in common."""
    headers = [header for header in map(header_of_record, records) if header is not None]
    if len(headers) < len(records):
        return None, []
    namespaces = {namespace_of(header) for header in headers}
    return (namespaces.pop() if len(namespaces) == 1 else None), [header.key for header in headers]
