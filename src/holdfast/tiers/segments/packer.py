"""Pack records into segment objects, and publish them: group commit of concurrent writes.

Records of one namespace that wait at the same time share an object of up to 64 MiB. A few threads
put objects, so saves take a bounded share of the connections. A put begins only while no read waits
for a connection. A record is OK once its object and an index object that lists it are stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.buffers import ALIGNMENT
from holdfast.errors import Outcome
from holdfast.tiers.segments.format import (
    SEGMENT_BLOCKS_MAX,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    IndexedSegment,
    SegmentName,
    head_bytes,
    write_head,
)
from holdfast.tiers.segments.medium import MediumAnswer
from holdfast.tiers.segments.request_slots import RequestSlots
from holdfast.wire.remote.stream import Deadline

LINGER_S = 0.05
"""Time for which a small object waits for more records, in seconds."""

_IDLE_S = 0.5

_log = logging.getLogger(__name__)


class RecordToPack(NamedTuple):
    """A record to save: the digest of its namespace, its key, and the packed record."""

    namespace: bytes
    key: bytes
    record: memoryview


class _Group:
    """Records of one namespace that become one object; `outcome` is set once it is stored."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.keys: list[bytes] = []
        self.records: list[memoryview] = []
        self.nbytes = 0
        self.begun_s = time.monotonic()
        self.until_s = float("inf")
        self.outcome: Outcome | None = None

    def has_room(self, nbytes: int) -> bool:
        blocks = len(self.records) + 1
        whole = head_bytes(blocks) + self.nbytes + nbytes
        return not self.records or (whole <= SEGMENT_BYTES_MAX and blocks <= SEGMENT_BLOCKS_MAX)

    def add(self, item: RecordToPack, until_s: float) -> None:
        self.keys.append(item.key)
        self.records.append(item.record)
        self.nbytes += len(item.record)
        self.until_s = min(self.until_s, until_s)


class SegmentPacker:
    """Saves records of one writer; `new_name` chooses the names of its objects.

    `publish` stores an index object that lists a segment. `discard` gets the name of an object that
    may have been stored although its put failed.
    """

    def __init__(
        self,
        put: Callable[[SegmentName, Sequence[memoryview], Deadline], MediumAnswer],
        publish: Callable[[IndexedSegment, Deadline], MediumAnswer],
        discard: Callable[[SegmentName], None],
        slots: RequestSlots,
        new_name: Callable[[], SegmentName],
    ) -> None:
        self._put = put
        self._publish = publish
        self._discard = discard
        self._slots = slots
        self._new_name = new_name
        self._condition = threading.Condition()
        self._open: OrderedDict[bytes, _Group] = OrderedDict()
        self._full: list[_Group] = []
        self._closing = False
        self._threads: list[threading.Thread] = []
        self.objects = 0
        """Segment objects stored since start."""

    def start(self, threads: int, name: str) -> None:
        """Start the threads that put objects: the most puts at a time."""
        for _ in range(threads):
            thread = threading.Thread(target=self._run, name=f"holdfast-{name}-put", daemon=True)
            thread.start()
            self._threads.append(thread)

    def save(self, items: Sequence[RecordToPack], deadline: Deadline) -> list[Outcome]:
        """Store records; return when all are stored or have failed, soon after the deadline."""
        with self._condition:
            if self._closing:
                return [Outcome.GONE] * len(items)
            groups = [self._join(item, deadline) for item in items]
            self._condition.notify_all()
            self._condition.wait_for(lambda: all(g.outcome is not None for g in groups))
        return [group.outcome or Outcome.GONE for group in groups]

    def close(self) -> None:
        """Fail what waits, and wait for puts in progress."""
        with self._condition:
            self._closing = True
            for group in [*self._open.values(), *self._full]:
                group.outcome = Outcome.GONE
            self._open.clear()
            self._full.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _join(self, item: RecordToPack, deadline: Deadline) -> _Group:
        """Add a record to the open group of its namespace. Call under the lock."""
        group = self._open.get(item.namespace)
        if group is not None and not group.has_room(len(item.record)):
            self._full.append(self._open.pop(item.namespace))
            group = None
        if group is None:
            group = self._open[item.namespace] = _Group(item.namespace)
        group.add(item, deadline.at)
        return group

    def _run(self) -> None:
        while True:
            with self._condition:
                while (group := self._take()) is None:
                    if self._closing:
                        return
                    self._condition.wait(LINGER_S / 2 if self._open else _IDLE_S)
            outcome = Outcome.GONE
            try:
                outcome = self._store(group)
            except Exception:  # noqa: BLE001  # the thread must go on: saves wait for it
                _log.exception("a segment could not be stored")
            with self._condition:
                group.outcome = outcome
                self._condition.notify_all()

    def _take(self) -> _Group | None:
        """Return the next group to store, if one is due. Call under the lock."""
        if self._full:
            return self._full.pop(0)
        now_s = time.monotonic()
        for namespace, group in self._open.items():
            if group.nbytes >= SEGMENT_BYTES_MIN or now_s >= group.begun_s + LINGER_S:
                return self._open.pop(namespace)
        return None

    def _store(self, group: _Group) -> Outcome:
        deadline = Deadline(group.until_s)
        with self._slots.write(deadline) as admitted:
            if not admitted:
                return Outcome.LATE
            name = self._new_name()
            head = write_head(
                group.namespace,
                [(key, len(r)) for key, r in zip(group.keys, group.records, strict=True)],
            )
            answer = self._put(name, [memoryview(head), *group.records], deadline)
        if answer.outcome is not Outcome.OK:
            self._discard(name)
            return answer.outcome if answer.outcome is not Outcome.MISS else Outcome.GONE
        sectors = np.array([len(record) // ALIGNMENT for record in group.records], "<u4").tobytes()
        listed = IndexedSegment(name.path, group.namespace, b"".join(group.keys), sectors)
        answer = self._publish(listed, deadline)
        if answer.outcome is not Outcome.OK:
            return answer.outcome if answer.outcome is not Outcome.MISS else Outcome.GONE
        self.objects += 1
        return Outcome.OK
