"""Save the live blocks of a segment again, because it is used and its age class ends soon."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from holdfast.blocks.envelope import header_of_record
from holdfast.blocks.namespace import namespace_digest, namespace_of
from holdfast.buffers import ALIGNMENT, aligned_buffer
from holdfast.codec.coded import check_reported
from holdfast.errors import FormatError, Outcome
from holdfast.tiers.segments.format import SegmentName, StoredRecord, head_bytes, read_head
from holdfast.tiers.segments.index import SegmentIndex
from holdfast.tiers.segments.medium import SegmentMedium
from holdfast.tiers.segments.packer import RecordToPack, SegmentPacker
from holdfast.tiers.segments.request_slots import RequestSlots
from holdfast.wire.remote.stream import Deadline

QUEUE_MAX = 64
"""Most segments that wait to be saved again; more are left out until the next read."""

_CALL_S = 30.0
_PAUSE_S = 1.0
"""Pause after each segment, so that saving again takes a small share of the medium, in seconds."""

_log = logging.getLogger(__name__)


class SegmentResaver:
    """One thread that copies segments, the one that was read first before others."""

    def __init__(
        self,
        medium: SegmentMedium,
        index: SegmentIndex,
        packer: SegmentPacker,
        slots: RequestSlots,
    ) -> None:
        self._medium = medium
        self._index = index
        self._packer = packer
        self._slots = slots
        self._condition = threading.Condition()
        self._queue: OrderedDict[SegmentName, None] = OrderedDict()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.saved = 0
        """Blocks saved again since start."""

    def add(self, name: SegmentName) -> None:
        """Queue a segment, unless the queue is full."""
        with self._condition:
            if len(self._queue) < QUEUE_MAX:
                self._queue[name] = None
                self._condition.notify()

    def start(self, name: str) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._run, name=f"holdfast-{name}-resave", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; a call in progress ends by its deadline."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._queue)
                if self._closing:
                    return
                name, _ = self._queue.popitem(last=False)
            try:
                self._save_again(name)
            except Exception:  # noqa: BLE001  # the thread must go on
                _log.exception("a segment could not be saved again")
            with self._condition:
                self._condition.wait_for(lambda: self._closing, _PAUSE_S)

    def _save_again(self, name: SegmentName) -> None:
        deadline = Deadline.within(_CALL_S)
        with self._slots.write(deadline) as admitted:
            if not admitted:
                return
            read = self._records(name, deadline)
        items = []
        for stored, record in read:
            header = header_of_record(record)
            if header is None or header.key != stored.key:
                continue
            namespace = namespace_of(header)
            if check_reported(record, header.key, namespace) is not Outcome.CORRUPT:
                items.append(RecordToPack(namespace_digest(namespace), header.key, record))
        if items:
            self.saved += self._packer.save(items, deadline).count(Outcome.OK)

    def _records(
        self, name: SegmentName, deadline: Deadline
    ) -> list[tuple[StoredRecord, memoryview]]:
        """Read the live records of a segment; none after a failure."""
        head = aligned_buffer(ALIGNMENT)
        answer = self._medium.read(name.path, 0, [head], deadline)
        if answer.outcome is not Outcome.OK:
            return []
        blocks = int.from_bytes(head[8:12], "little")
        size = head_bytes(min(blocks, 1 << 14))
        if size > len(head):
            head = aligned_buffer(size)
            answer = self._medium.read(name.path, 0, [head], deadline)
        try:
            _, records = read_head(head)
        except FormatError:
            return []
        live = self._index.live_keys(name, [record.key for record in records])
        wanted = [record for record, is_live in zip(records, live, strict=True) if is_live]
        found = []
        for record in wanted:
            into = aligned_buffer(record.nbytes)
            answer = self._medium.read(name.path, record.start, [into], deadline)
            if (answer.outcome, answer.nbytes) == (Outcome.OK, record.nbytes):
                found.append((record, into))
        return found
