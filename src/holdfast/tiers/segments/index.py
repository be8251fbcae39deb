"""Index of the blocks on a medium: which segment object has each block, from index objects only.

About 35 bytes a block: a 64-bit tag of namespace and key, a position, and the record's offset. Two
blocks with the same tag are told apart when a record is read, because every record is verified.
Further copies of a block, in other segments, take 12 bytes each. One of them takes the place of the
copy that was found first, when that is deleted or its segment leaves.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.buffers import ALIGNMENT
from holdfast.tiers.segments.format import (
    DurableSegment,
    IndexedSegment,
    SegmentName,
    head_bytes,
    parse_segment_name,
)
from holdfast.tiers.segments.tag_table import ABSENT, Tags, TagTable, Values

_SHIFT = 20
"""Bits of a value for the position within a segment; the others number the segment."""


_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)
_ODD_KEYS = np.uint64(0xC2B2_AE3D_27D4_EB4F)

_DEAD_MAX = 64
"""Segments that may leave before the table is searched for their blocks."""


class RecordPosition(NamedTuple):
    """Where a record is: the segment's number in this index, first byte, and length in bytes."""

    segment: int
    at: int
    start: int
    nbytes: int


class SegmentState(NamedTuple):
    """What this process knows of a segment; `used_s` is the last read here, in monotonic seconds.

    `live_blocks`: blocks whose position is in this segment, because no other segment with them
    outlasts it, and that were not deleted. The others of its blocks that were not deleted are
    further copies. `durable_until_s`: until when, in seconds since 1970, it has durable blocks that
    no other durable segment has for as long; 0 if it has none.
    """

    name: SegmentName
    namespace: bytes
    nbytes: int
    blocks: int
    live_blocks: int
    used_s: float
    durable_until_s: float = 0.0


class _Copies(NamedTuple):
    """Blocks of one segment whose position is in another one: their tags, and positions here."""

    tags: Tags
    at: npt.NDArray[np.uint32]

    def joined(self, tags: Tags, at: npt.NDArray[np.signedinteger[Any]]) -> _Copies:
        """Return these and others."""
        return _Copies(
            np.concatenate((self.tags, tags)), np.concatenate((self.at, at.astype(np.uint32)))
        )

    def chosen(self, mask: npt.NDArray[np.bool_]) -> _Copies:
        """Return those for which the mask is true."""
        return _Copies(self.tags[mask], self.at[mask])


_NO_COPIES = _Copies(np.zeros(0, np.uint64), np.zeros(0, np.uint32))


class _Segment:
    """A segment; `copies`: its blocks that are found in segments that outlast it.

    `hides`: whether blocks of it may be among the copies of another segment.
    """

    __slots__ = ("copies", "hides", "live", "name", "namespace", "starts", "used_s")

    def __init__(self, listed: IndexedSegment, now_s: float) -> None:
        self.name = listed.name
        self.namespace = listed.namespace
        sectors = np.frombuffer(listed.sectors, "<u4")
        first = head_bytes(listed.blocks) // ALIGNMENT
        self.starts: npt.NDArray[np.uint32] = np.concatenate(([0], np.cumsum(sectors))).astype(
            np.uint32
        ) + np.uint32(first)
        self.live = 0
        self.used_s = now_s
        self.copies = _NO_COPIES
        self.hides = False

    @property
    def nbytes(self) -> int:
        return int(self.starts[-1]) * ALIGNMENT

    def state(self) -> SegmentState:
        blocks = len(self.starts) - 1
        return SegmentState(self.name, self.namespace, self.nbytes, blocks, self.live, self.used_s)


class SegmentIndex:
    """Thread-safe; no call does I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        """Segments by number. The number of one that left is not used again."""
        self._next = 0
        self._numbers: dict[SegmentName, int] = {}
        self._table = TagTable()
        self._dead = 0
        """Segments that left since the table was last cleared of their blocks."""
        self.stored_bytes = 0
        """Bytes of all segments."""
        self._durable_until: dict[SegmentName, float] = {}
        """Until when segments have durable blocks, in seconds since 1970; also of segments that are
        not known yet."""
        self._leaving: set[SegmentName] = set()
        """Segments that this process is about to retire."""

    def add(self, listed: IndexedSegment, now_s: float, removed: bytes = b"") -> None:
        """Add a segment; its blocks have their positions in it, or in a segment that outlasts it.

        `removed`: keys of its blocks that were deleted, which stay where they are, if anywhere.

        Which of two segments a block belongs to follows from their names, so all writers agree, in
        whichever order they learn of them: each deletes those of its own without live blocks. A
        segment that is here already is not added. Of a block that a segment has twice, the last
        record counts.
        """
        tags, positions = _distinct(_tags(listed.namespace, listed.keys))
        with self._lock:
            if listed.name in self._numbers:
                return
            number = self._numbers[listed.name] = self._next
            self._next += 1
            segment = self._segments[number] = _Segment(listed, now_s)
            self.stored_bytes += segment.nbytes
            found = self._find(tags)
            deleted = np.isin(tags, _tags(listed.namespace, removed))
            further = self._outlast(found, segment) & ~deleted
            segment.copies = _NO_COPIES.joined(tags[further], positions[further])
            self._note_hiding(found[further])
            stays = further | deleted
            segment.live = len(tags) - int(stays.sum())
            self._move_away(tags[~stays], found[~stays], segment)
            self._table.put(tags[~stays], np.int64(number << _SHIFT) | positions[~stays])

    def held_run(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are held."""
        if not keys:
            return 0
        tags = _tags(namespace, b"".join(keys))
        with self._lock:
            found = self._find(tags)
        absent = np.flatnonzero(found == ABSENT)
        return int(absent[0]) if absent.size else len(keys)

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key, in any order: 1 if the block is held."""
        if not keys:
            return b""
        tags = _tags(namespace, b"".join(keys))
        with self._lock:
            found = self._find(tags)
        held: npt.NDArray[np.bool_] = found != ABSENT
        return held.tobytes()

    def positions(
        self, blocks: Sequence[tuple[bytes, bytes]], now_s: float | None
    ) -> list[RecordPosition | None]:
        """Return where each block is, given as namespace digest and key.

        Counts a use of its segment at `now_s`, unless that is None.
        """
        if not blocks:
            return []
        tags = _tags_of(blocks)
        with self._lock:
            found = self._find(tags)
            return [self._position(int(value), now_s) for value in found]

    def name_of(self, number: int) -> SegmentName | None:
        """Return the name of a segment by its number in this index; None if it has left."""
        with self._lock:
            segment = self._segments.get(number)
            return segment.name if segment is not None else None

    def segments_of_writer(
        self, namespace: bytes, keys: Sequence[bytes], writer: str
    ) -> list[SegmentName | None]:
        """Return for each key a segment of this writer that has a copy of the block, if any."""
        if not keys:
            return []
        tags = _tags(namespace, b"".join(keys))
        with self._lock:
            mine = {
                number: segment
                for number, segment in self._segments.items()
                if segment.name.writer == writer
            }
            numbers = [int(value) >> _SHIFT for value in self._find(tags)]
            names = [mine[number].name if number in mine else None for number in numbers]
            for segment in mine.values() if None in names else ():
                if len(segment.copies.tags):
                    for at in np.flatnonzero(np.isin(tags, segment.copies.tags)):
                        names[at] = names[at] or segment.name
            return names

    def forget_segment(self, name: SegmentName) -> int:
        """Remove a segment with all its copies; return how many of them were live.

        Blocks of which other segments have copies are found there then.
        """
        with self._lock:
            self._durable_until.pop(name, None)
            number = self._numbers.pop(name, None)
            if number is None:
                return 0
            segment = self._segments.pop(number)
            self.stored_bytes -= segment.nbytes
            self._dead += 1
            if segment.hides and segment.live:
                self._find_copies()
            if self._dead > _DEAD_MAX and 2 * self._dead > len(self._numbers):
                self._compact()
            return segment.live

    def forget_blocks(self, name: SegmentName, keys: bytes) -> int:
        """Remove this segment's copies of blocks (16 bytes each); return how many were live.

        Blocks of which other segments have copies are found there then.
        """
        with self._lock:
            number = self._numbers.get(name)
            if number is None or not keys:
                return 0
            segment = self._segments[number]
            tags = np.unique(_tags(segment.namespace, keys))
            found = self._find(tags)
            here = (found != ABSENT) & ((found >> _SHIFT) == number)
            segment.copies = segment.copies.chosen(~np.isin(segment.copies.tags, tags))
            self._release(found[here])
            self._table.put(tags[here], np.full(int(here.sum()), ABSENT, np.int64))
            if segment.hides and here.any():
                self._find_copies()
            return int(here.sum())

    def segments(self) -> list[SegmentState]:
        """Return the state of all segments."""
        with self._lock:
            return [
                segment.state()._replace(durable_until_s=self._has_durable_until(segment))
                for segment in self._segments.values()
            ]

    def keep(self, durable: Sequence[DurableSegment], wall_s: float) -> bool:
        """Note segments with durable blocks, known or not; return whether none of them is leaving.

        `wall_s`: the time now. A segment that is leaving is not noted.
        """
        with self._lock:
            is_kept = True
            for path, until_s in ((each.path, each.until_s) for each in durable):
                name = parse_segment_name(path)
                if name is None or not until_s > wall_s:
                    continue
                if name in self._leaving:
                    is_kept = False
                    continue
                known_s = self._durable_until.get(name, 0.0)
                self._durable_until[name] = max(known_s, min(until_s, name.expires_s()))
            if len(self._durable_until) > len(self._numbers) + _DEAD_MAX:
                ended = [name for name in self._durable_until if name.expires_s() <= wall_s]
                for name in ended:
                    del self._durable_until[name]
            return is_kept

    def durable_until_s(self, name: SegmentName) -> float:
        """Return until when a segment has durable blocks, in seconds since 1970; 0: it has none."""
        with self._lock:
            return self._durable_until.get(name, 0.0)

    def begin_leaving(self, names: Sequence[SegmentName], wall_s: float) -> list[SegmentName]:
        """Note segments that are about to be retired; return them.

        Without those that have become durable since they were chosen, which stay.
        """
        with self._lock:
            known = [(name, self._numbers[name]) for name in names if name in self._numbers]
            leaving = [
                name
                for name, number in known
                if name.expires_s() <= wall_s
                or self._has_durable_until(self._segments[number]) <= wall_s
            ]
            self._leaving |= {*leaving}
            return leaving

    def end_leaving(self, names: Sequence[SegmentName]) -> None:
        """Note that segments were retired, or stay because that failed."""
        with self._lock:
            self._leaving -= {*names}

    def live_keys(self, name: SegmentName, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key of a segment, in its order, whether it is live there."""
        with self._lock:
            number = self._numbers.get(name)
            if number is None:
                return [False] * len(keys)
            segment = self._segments[number]
            if len(keys) != len(segment.starts) - 1:
                return [False] * len(keys)
            found = self._find(_tags(segment.namespace, b"".join(keys)))
        return [int(value) == (number << _SHIFT | at) for at, value in enumerate(found)]

    def counts(self) -> tuple[int, int, int]:
        """Return the segments, their bytes and their live blocks."""
        states = self.segments()
        nbytes = sum(state.nbytes for state in states)
        return len(states), nbytes, sum(state.live_blocks for state in states)

    @property
    def nbytes(self) -> int:
        """Memory of the index in bytes, roughly."""
        with self._lock:
            arrays = sum(
                s.starts.nbytes + s.copies.tags.nbytes + s.copies.at.nbytes
                for s in self._segments.values()
            )
            return self._table.nbytes + arrays + 400 * len(self._numbers)

    def _find(self, tags: Tags) -> Values:
        """Return values of live segments. Call under the lock."""
        found = self._table.find(tags)
        for number in set((found[found >= 0] >> _SHIFT).tolist()):
            if number not in self._segments:
                found[(found >= 0) & ((found >> _SHIFT) == number)] = ABSENT
        return found

    def _outlast(self, values: Values, segment: _Segment) -> npt.NDArray[np.bool_]:
        """Return for each value whether its segment outlasts this one. Call under the lock."""
        stays = np.zeros(len(values), np.bool_)
        for number in set((values[values >= 0] >> _SHIFT).tolist()):
            other = self._segments.get(number)
            if other is not None and _rank(other.name) > _rank(segment.name):
                stays |= (values >= 0) & ((values >> _SHIFT) == number)
        return stays

    def _move_away(self, tags: Tags, values: Values, to: _Segment) -> None:
        """Note that blocks are found in another segment now, if anywhere before.

        Their former segments keep further copies. Call under the lock.
        """
        for number in set((values[values >= 0] >> _SHIFT).tolist()):
            segment = self._segments.get(number)
            if segment is not None:
                mine = (values >= 0) & ((values >> _SHIFT) == number)
                at = values[mine] & ((1 << _SHIFT) - 1)
                segment.copies = segment.copies.joined(tags[mine], at)
                to.hides = True
        self._release(values)

    def _note_hiding(self, values: Values) -> None:
        """Note segments in which blocks are found that others have too. Call under the lock."""
        for number in set((values[values >= 0] >> _SHIFT).tolist()):
            if (segment := self._segments.get(number)) is not None:
                segment.hides = True

    def _find_copies(self) -> None:
        """Let blocks that are found nowhere be found where there are further copies of them.

        Of several copies, that of the segment that outlasts the others. Call under the lock.
        """
        holders = [
            (number, segment)
            for number, segment in self._segments.items()
            if len(segment.copies.tags)
        ]
        if not holders:
            return
        holders.sort(key=lambda one: _rank(one[1].name))
        tags = np.concatenate([segment.copies.tags for _, segment in holders])
        places = np.concatenate(
            [
                np.int64(number << _SHIFT) | segment.copies.at.astype(np.int64)
                for number, segment in holders
            ]
        )
        free = self._find(tags) == ABSENT
        self._table.put(tags[free], places[free])  # of several copies the last one stays
        found = self._find(tags)
        chosen, at = found == places, 0
        self._note_hiding(found[~chosen])
        for _, segment in holders:
            mine = chosen[at : at + len(segment.copies.tags)]
            at += len(mine)
            if mine.any():
                segment.live += int(mine.sum())
                segment.copies = segment.copies.chosen(~mine)

    def _position(self, value: int, now_s: float | None) -> RecordPosition | None:
        segment = self._segments.get(value >> _SHIFT) if value != ABSENT else None
        if segment is None:
            return None
        if now_s is not None:
            segment.used_s = now_s
        at = value & ((1 << _SHIFT) - 1)
        start, end = int(segment.starts[at]), int(segment.starts[at + 1])
        nbytes = (end - start) * ALIGNMENT
        return RecordPosition(value >> _SHIFT, at, start * ALIGNMENT, nbytes)

    def _has_durable_until(self, segment: _Segment) -> float:
        """Return until when a segment has durable blocks that no other one has for as long.

        0: it has none. Call under the lock.
        """
        until_s = self._durable_until.get(segment.name, 0.0)
        if not until_s or segment.live:
            return until_s
        found = self._find(segment.copies.tags)
        others = [self._segments[n].name for n in set((found[found >= 0] >> _SHIFT).tolist())]
        are_kept = all(self._durable_until.get(name, 0.0) >= until_s for name in others)
        return 0.0 if are_kept else until_s

    def _release(self, values: Values) -> None:
        """Count blocks that leave their segments. Call under the lock."""
        for number, blocks in Counter((values[values >= 0] >> _SHIFT).tolist()).items():
            if (segment := self._segments.get(number)) is not None:
                segment.live -= blocks

    def _compact(self) -> None:
        """Remove the blocks of segments that left. Call under the lock."""
        self._table.keep(np.array([*self._segments], np.int64), _SHIFT)
        self._dead = 0


def _rank(name: SegmentName) -> tuple[float, str, str]:
    """Order segments of all writers: those that are kept longer, and newer ones, come later."""
    return name.expires_s(), name.number, name.writer


def _tags(namespace: bytes, keys: bytes) -> Tags:
    """Return a tag for each key of one namespace."""
    return _mixed(np.frombuffer(keys, "<u8"), np.frombuffer(namespace, "<u8"))


def _distinct(tags: Tags) -> tuple[Tags, npt.NDArray[np.int64]]:
    """Return the tags, each once, and the last position of each."""
    distinct, from_end = np.unique(tags[::-1], return_index=True)
    return distinct, (len(tags) - 1 - from_end).astype(np.int64)


def _tags_of(blocks: Sequence[tuple[bytes, bytes]]) -> Tags:
    """Return a tag for each block, given as namespace digest and key."""
    keys = np.frombuffer(b"".join(key for _, key in blocks), "<u8")
    return _mixed(keys, np.frombuffer(b"".join(space for space, _ in blocks), "<u8"))


def _mixed(keys: Tags, spaces: Tags) -> Tags:
    """Mix both halves of keys and namespaces, which are hashes already, into 64 bits."""
    tags: Tags = keys[::2] ^ (keys[1::2] * _ODD_KEYS) ^ spaces[::2] ^ (spaces[1::2] * _ODD)
    return tags
