"""The index objects on a medium: publish what this writer did, and learn what the others did.

A writer publishes under new, numbered names and replaces nothing. Publications of several threads
share an object (group commit). A reader learns of new objects by listing. Small objects of a writer
are merged into larger ones: `MERGE_COUNT` of one level become one of the next, or as many as fit in
`INDEX_BYTES_MAX`. The old ones are deleted after a while, when every reader has listed the new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from holdfast.errors import FormatError, Outcome
from holdfast.limits import KIB
from holdfast.tiers.segments.format import (
    INDEX,
    INDEX_BYTES_MAX,
    DurableSegment,
    IndexedSegment,
    IndexName,
    IndexObject,
    RemovedBlocks,
    next_number,
    parse_index_name,
    read_index,
    write_index,
)
from holdfast.tiers.segments.medium import MediumAnswer, SegmentMedium
from holdfast.tiers.segments.writer import SegmentWriter
from holdfast.wire.remote.stream import Deadline
from holdfast.workers import parallel

MERGE_COUNT = 32
"""Index objects of one level that are merged into one of the next."""

_MERGED_BYTES_MAX = INDEX_BYTES_MAX - 64 * KIB
"""Most bytes of the objects that are merged: the rest is for the numbers of those replaced."""

DOUBTFUL_S = 86_400.0
"""Time for which an object whose put failed is expected to be found, in seconds."""

_READ_BYTES = 256 * KIB
"""Bytes of an index object that are read first; larger ones take more requests."""

_log = logging.getLogger(__name__)


class _Publication:
    """What one thread wants published, and the answer once it was."""

    def __init__(self, content: IndexObject) -> None:
        self.content = content
        self.answer: MediumAnswer | None = None


class _StoredObject(NamedTuple):
    """An index object that is stored: how often its content was merged, and its length."""

    level: int
    nbytes: int


class IndexPublisher:
    """Publishes index objects of one writer. Thread-safe."""

    def __init__(self, medium: SegmentMedium, writer: SegmentWriter) -> None:
        self._medium = medium
        self._writer = writer.id
        self._wall_s = writer.wall_s
        self._condition = threading.Condition()
        self._waiting: list[_Publication] = []
        self._busy = False
        self._number = ""
        self._stored: dict[str, _StoredObject] = {}
        """This writer's index objects that no other replaces, by number."""
        self._unreadable: set[str] = set()
        """Numbers of those that could not be read back. They stay as they are."""
        self._published: set[str] = set()
        """Numbers of objects that were stored and not deleted since."""
        self._doubtful: set[str] = set()
        """Numbers of objects whose put failed; they may be on the medium."""
        self.published_s = time.monotonic()

    def publish(self, content: IndexObject, deadline: Deadline) -> MediumAnswer:
        """Publish with whatever other threads publish at the same time; OK once it is stored."""
        mine = _Publication(content)
        with self._condition:
            self._waiting.append(mine)
            while self._busy and mine.answer is None:
                if not self._condition.wait(max(0.0, deadline.at - time.monotonic())):
                    if mine in self._waiting:
                        self._waiting.remove(mine)
                        return MediumAnswer(Outcome.LATE, why="other index objects are late")
                    self._condition.wait()  # another thread publishes it, by its own deadline
            if mine.answer is not None:
                return mine.answer
            batch, self._waiting, self._busy = self._waiting, [], True
            number = self._next_number()
        answer = MediumAnswer(Outcome.GONE, why="failed")
        try:
            answer = self._put(number, _joined([each.content for each in batch]), deadline)
        finally:
            with self._condition:
                self._busy = False
                for each in batch:
                    each.answer = answer
                self._condition.notify_all()
        return answer

    def is_own(self, name: IndexName) -> bool:
        """Return whether this writer has published the object: there is nothing new in it."""
        with self._condition:
            return name.writer == self._writer and name.number in self._published

    def confirm(self, name: IndexName, content: IndexObject, deadline: Deadline) -> bool:
        """Return whether an object that was found is stored safely, as far as this writer knows.

        One of its own whose put failed is put again: others have learned what it lists, but it may
        be gone after a crash.
        """
        with self._condition:
            if name.writer != self._writer or name.number not in self._doubtful:
                return True
        return self._put(name.number, content, deadline).outcome is Outcome.OK

    def forget(self, names: Sequence[IndexName]) -> None:
        """Forget objects that were deleted from the medium."""
        numbers = {name.number for name in names if name.writer == self._writer}
        with self._condition:
            self._published -= numbers
            self._unreadable -= numbers
            for number in numbers:
                self._stored.pop(number, None)

    def current(self) -> set[IndexName]:
        """Return the index objects of this writer that are stored and that no other replaces."""
        with self._condition:
            return {IndexName(self._writer, number) for number in self._stored}

    def merge(
        self, retain: Callable[[IndexObject], IndexObject], deadline: Deadline
    ) -> list[IndexName]:
        """Merge small objects if there are many; return those that are to be deleted later.

        `retain` leaves out of the merged content what no longer exists. An object that is damaged
        or absent is neither merged nor returned.
        """
        level, numbers = self._mergeable()
        contents = {}
        for number in numbers:
            name = IndexName(self._writer, number)
            answer, content = read_index_object(self._medium, name, deadline)
            if answer.outcome not in (Outcome.OK, Outcome.MISS):
                return []
            if content is not None:
                contents[number] = content
            else:
                self._note_unreadable(name, answer.outcome)
        if len(contents) < 2:  # noqa: PLR2004  # one object alone is not merged
            return []
        joined = retain(_joined(list(contents.values())))
        merged = IndexObject(
            joined.segments,
            joined.removed,
            joined.retired,
            list(contents),
            level + 1,
            joined.durable,
        )
        with self._condition:
            number = self._next_number()
        if self._put(number, merged, deadline).outcome is not Outcome.OK:
            return []
        with self._condition:
            for each in contents:
                self._stored.pop(each, None)
        return [IndexName(self._writer, each) for each in contents]

    def _mergeable(self) -> tuple[int, list[str]]:
        """Return a level, and the numbers of objects of it that are to be merged; often none."""
        with self._condition:
            by_level: dict[int, list[str]] = {}
            for number in sorted(self._stored.keys() - self._unreadable):
                by_level.setdefault(self._stored[number].level, []).append(number)
            for level, numbers in sorted(by_level.items()):
                if len(numbers) < MERGE_COUNT:
                    continue
                fitting, nbytes = [], 0
                for number in numbers:
                    if nbytes + self._stored[number].nbytes <= _MERGED_BYTES_MAX:
                        fitting.append(number)
                        nbytes += self._stored[number].nbytes
                if len(fitting) > 1:
                    return level, fitting
        return 0, []

    def _note_unreadable(self, name: IndexName, outcome: Outcome) -> None:
        with self._condition:
            if outcome is Outcome.MISS:
                self._stored.pop(name.number, None)
            else:
                self._unreadable.add(name.number)
        if outcome is not Outcome.MISS:
            _log.warning("the index object %s is damaged, and is not merged", name.path)

    def _put(self, number: str, content: IndexObject, deadline: Deadline) -> MediumAnswer:
        name = IndexName(self._writer, number)
        data = write_index(content)
        answer = self._medium.put(name.path, [memoryview(data)], deadline)
        if answer.outcome is Outcome.OK:
            with self._condition:
                self._stored[number] = _StoredObject(content.level, len(data))
                self._published.add(number)
                self._doubtful.discard(number)
                self.published_s = time.monotonic()
        elif answer.outcome is not Outcome.LATE:  # a late object is stored safely, or not at all
            with self._condition:
                self._doubtful.add(number)
                oldest_s = self._wall_s() - DOUBTFUL_S
                self._doubtful = {
                    each
                    for each in self._doubtful
                    if IndexName(self._writer, each).created_s >= oldest_s
                }
        return answer

    def _next_number(self) -> str:
        """Return a new number. Call under the lock."""
        self._number = next_number(self._number, self._wall_s())
        return self._number


class IndexReader:
    """Finds and reads index objects that are new. One thread at a time calls it."""

    def __init__(self, medium: SegmentMedium, threads: ThreadPoolExecutor) -> None:
        self._medium = medium
        self._threads = threads
        self._seen: set[IndexName] = set()
        self.damaged = 0
        """Index objects that could not be read, because they are damaged or of another format."""
        self.unconfirmed = 0
        """Objects of this writer in the last listing that it could not put again."""

    def poll(
        self, publisher: IndexPublisher, deadline: Deadline
    ) -> tuple[MediumAnswer, list[tuple[IndexName, IndexObject]], set[IndexName]]:
        """List; return the answer, the new objects in their order, and the names of all.

        An object that could not be read in time, or not be confirmed by `publisher`, the writer of
        this process, is read by the next poll.
        """
        answer = self._medium.list(INDEX, deadline)
        if answer.outcome is not Outcome.OK:
            return answer, [], set()
        listed = {name for path in answer.names if (name := parse_index_name(path)) is not None}
        self._seen &= listed
        wanted = sorted(
            (name for name in listed - self._seen if not publisher.is_own(name)),
            key=lambda name: (name.number, name.writer),
        )
        found = []
        self.unconfirmed = 0
        for name, (outcome, content) in zip(
            wanted,
            parallel(
                lambda name: read_index_object(self._medium, name, deadline), wanted, self._threads
            ),
            strict=True,
        ):
            if outcome.outcome is Outcome.OK:
                if content is not None and not publisher.confirm(name, content, deadline):
                    self.unconfirmed += 1
                    continue
                self._seen.add(name)
                if content is None:
                    self.damaged += 1
                    _log.warning("the index object %s is damaged or of another format", name.path)
                else:
                    found.append((name, content))
            elif outcome.outcome is not Outcome.MISS:
                answer = outcome
        return answer, found, listed


def read_index_object(
    medium: SegmentMedium, name: IndexName, deadline: Deadline
) -> tuple[MediumAnswer, IndexObject | None]:
    """Return the answer, and the content; None if it failed, or is damaged."""
    data, at, size = bytearray(), 0, _READ_BYTES
    while True:
        piece = bytearray(size)
        answer = medium.read(name.path, at, [memoryview(piece)], deadline)
        if answer.outcome is not Outcome.OK:
            return answer, None
        data += piece[: answer.nbytes]
        at += answer.nbytes
        if answer.nbytes < size or at > INDEX_BYTES_MAX:
            break
        size = min(4 * size, INDEX_BYTES_MAX)
    try:
        return answer, read_index(memoryview(data))
    except FormatError:
        return answer, None


def _joined(contents: Sequence[IndexObject]) -> IndexObject:
    segments: list[IndexedSegment] = []
    removed: list[RemovedBlocks] = []
    retired: list[str] = []
    durable: list[DurableSegment] = []
    for content in contents:
        segments += content.segments
        removed += content.removed
        retired += content.retired
        durable += content.durable
    return IndexObject(segments, removed, retired, durable=durable)
