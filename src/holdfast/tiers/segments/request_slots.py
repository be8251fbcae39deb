"""Slots for requests to a medium: reads before writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.wire.remote.stream import Deadline


class RequestSlots:
    """At most `reads` reads and `writes` writes are under way at a time. Thread-safe.

    A write begins only while no read waits. `waits` counts writes that had to wait for reads.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._condition = threading.Condition()
        self._reads_free = reads
        self._writes_free = writes
        self._reads_waiting = 0
        self.waits = 0

    @contextmanager
    def read(self, deadline: Deadline) -> Iterator[bool]:
        """Hold a slot for a read; yield False if none is free by the deadline."""
        with self._condition:
            self._reads_waiting += 1
            try:
                admitted = self._condition.wait_for(lambda: self._reads_free > 0, _left_s(deadline))
            finally:
                self._reads_waiting -= 1
            self._reads_free -= admitted
            self._condition.notify_all()
        try:
            yield admitted
        finally:
            with self._condition:
                self._reads_free += admitted
                self._condition.notify_all()

    @contextmanager
    def write(self, deadline: Deadline) -> Iterator[bool]:
        """Hold a slot for a write; yield False if none is free by the deadline."""
        with self._condition:
            self.waits += bool(self._reads_waiting)
            admitted = self._condition.wait_for(
                lambda: self._writes_free > 0 and not self._reads_waiting, _left_s(deadline)
            )
            self._writes_free -= admitted
        try:
            yield admitted
        finally:
            with self._condition:
                self._writes_free += admitted
                self._condition.notify_all()


def _left_s(deadline: Deadline) -> float:
    return max(0.0, deadline.at - time.monotonic())
