"""The part of a batch that belongs to one segment, and its deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.namespace import Namespace, namespace_of
from holdfast.errors import FormatError
from holdfast.tiers.base import Place, TierGet, segment_place


class SegmentBatch(NamedTuple):
    """Indices into a batch of the records of one segment.

    However many members are asked, all work on it ends at `until`, in `time.monotonic()`.
    """

    segment: bytes
    indices: list[int]
    until: float

    @property
    def left_s(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self.until - time.monotonic())


def parts_of(places: Sequence[Place], seconds: float) -> list[SegmentBatch]:
    """Split a batch by segment."""
    until = time.monotonic() + seconds
    groups: dict[Place, list[int]] = {}
    for index, place in enumerate(places):
        groups.setdefault(place, []).append(index)
    return [SegmentBatch(segment_of(place), indices, until) for place, indices in groups.items()]


def parts_of_gets(batch: Sequence[TierGet], seconds: float) -> list[SegmentBatch]:
    """Split a batch by segment and namespace, because a message names one namespace."""
    until = time.monotonic() + seconds
    groups: dict[tuple[Place, Namespace | None], list[int]] = {}
    for index, get in enumerate(batch):
        groups.setdefault((get.place, get.namespace), []).append(index)
    return [
        SegmentBatch(segment_of(place), indices, until) for (place, _), indices in groups.items()
    ]


def segment_of(place: Place) -> bytes:
    """Return the segment id of a place."""
    return place.to_bytes(SEGMENT_BYTES, "little")


def place_of(record: memoryview) -> Place:
    """Return the place of a record's segment; any place for bytes that are no record."""
    try:
        return segment_place(read_header(record)[0].segment)
    except FormatError:
        return Place(0)


def names_of(records: Sequence[memoryview]) -> tuple[Namespace | None, list[bytes]]:
    """Return the keys of records, and their namespace if they have one in common."""
    try:
        headers = [read_header(record)[0] for record in records]
    except FormatError:
        return None, []
    namespaces = {namespace_of(header) for header in headers}
    return (namespaces.pop() if len(namespaces) == 1 else None), [header.key for header in headers]
