"""The part of a batch that goes to one segment, and until when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.envelope import read_header
from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.errors import FormatError
from holdfast.tiers.base import Place, segment_place


class Part(NamedTuple):
    """Indices into a batch of what goes to one segment.

    However many members are asked, all of it is over by `until`, in `time.monotonic()`.
    """

    segment: bytes
    indices: list[int]
    until: float

    @property
    def left_s(self) -> float:
        """What is left of the time."""
        return max(0.0, self.until - time.monotonic())


def parts_of(places: Sequence[Place], seconds: float) -> list[Part]:
    """Cut a batch into the parts of its segments."""
    until = time.monotonic() + seconds
    groups: dict[Place, list[int]] = {}
    for index, place in enumerate(places):
        groups.setdefault(place, []).append(index)
    return [Part(segment_of(place), indices, until) for place, indices in groups.items()]


def segment_of(place: Place) -> bytes:
    """Return the segment's id that a place stands for."""
    return place.to_bytes(SEGMENT_BYTES, "little")


def place_of(record: memoryview) -> Place:
    """Return the place of a record's segment; a record that is none goes anywhere."""
    try:
        return segment_place(read_header(record)[0].segment)
    except FormatError:
        return Place(0)


def names_of(records: Sequence[memoryview]) -> tuple[World | None, list[bytes]]:
    """Return the world and the keys of records; no world where they have not one in common."""
    try:
        headers = [read_header(record)[0] for record in records]
    except FormatError:
        return None, []
    worlds = {World(h.fingerprint, h.domain, h.payload_bytes, h.tokens) for h in headers}
    return (worlds.pop() if len(worlds) == 1 else None), [header.key for header in headers]
