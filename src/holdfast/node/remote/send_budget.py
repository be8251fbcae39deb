"""Divide a target's send memory and send slots fairly between domains.

Records stay in memory while they are sent, so a peer that reads slowly occupies memory. The send
budget limits these bytes, per domain by weight. The send scheduler divides messages into pieces and
sends a few pieces at once, in fair-queue order; a connection whose peer accepts nothing gives up
its slot until it does. So a domain that floods with connections, or does not read, delays only
itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence

from holdfast.fairness.fair_queue import FairQueue, WorkItem
from holdfast.fairness.work_slots import WorkSlots
from holdfast.wire.remote.stream import Buffer, ProgressLimit, Stream, pieces

PIECE_BYTES = 2 << 20
LARGE_PIECE_BYTES = 64 << 20
"""Bytes sent per slot: beside other messages, and if no other message waits or is sent."""

SMALL_BYTES = 256 << 10
"""A message up to this size bypasses the queue while it is empty and few such are being sent."""

MIN_COST_BYTES = 128 << 10
"""Minimum cost of a piece: about the processor time of a message, expressed in bytes."""

SLOT_S = 0.05
"""Longest time in a slot; a peer that has not accepted its piece by its end waits for another."""

SPARE_SLOTS = 2
_SLOT_TIMEOUT_S = 30.0


class SendBudget:
    """Limits the bytes in memory that are being sent: `most` in all, divided between domains.

    A domain without any bytes here may always add one message.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._queue: FairQueue[threading.Event] = FairQueue()
        self._shares: dict[bytes, float] = {}
        self._held: dict[bytes, int] = {}

    def total(self) -> int:
        """Return the bytes being sent for all domains."""
        with self._lock:
            return sum(self._held.values())

    def acquire(self, work_item: WorkItem, timeout_s: float) -> bool:
        """Wait for the item's cost in bytes to fit, and count it until `release`.

        Return False on timeout.
        """
        with self._lock:
            if not self._queue and self._fits(work_item):
                self._count(work_item)
                return True
            admitted = threading.Event()
            self._queue.advance(time.monotonic())
            self._queue.put(work_item, admitted)
            self._admit_waiting()
        if admitted.wait(timeout_s):
            return True
        with self._lock:
            if admitted.is_set():
                return True
            self._queue.withdraw(work_item.flow, lambda waiting: waiting is admitted)
            self._admit_waiting()
        return False

    def release(self, work_item: WorkItem) -> None:
        """Release the bytes of an acquired item."""
        with self._lock:
            left = self._held.pop(work_item.domain, 0) - int(work_item.cost)
            if left:
                self._held[work_item.domain] = left
            else:
                self._shares.pop(work_item.domain, None)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        self._queue.advance(time.monotonic())
        while (
            taken := self._queue.take(lambda flow: self._fits(self._queue.head(flow)))
        ) is not None:
            work_item, admitted = taken
            self._count(work_item)
            admitted.set()

    def _count(self, work_item: WorkItem) -> None:
        self._held[work_item.domain] = self._held.get(work_item.domain, 0) + int(work_item.cost)
        self._shares[work_item.domain] = work_item.share

    def _fits(self, work_item: WorkItem) -> bool:
        """Whether the item's bytes fit its domain's part and the whole budget."""
        own = self._held.get(work_item.domain, 0)
        if not own:
            return True
        others = sum(self._shares.values()) - self._shares[work_item.domain]
        part = self._most * work_item.share / (work_item.share + others)
        return (
            own + work_item.cost <= part and sum(self._held.values()) + work_item.cost <= self._most
        )


class SendScheduler:
    """Sends pieces of a few connections at once, scheduled fairly between domains."""

    def __init__(self, at_once: int = 0) -> None:
        self._at_once = at_once or max(2, (os.cpu_count() or 2) // 2)
        self._work_slots: WorkSlots[threading.Event] = WorkSlots(self._at_once, SPARE_SLOTS)
        self._bypassing = 0
        """Small messages being sent without a slot."""
        self._lock = threading.Lock()

    def send(
        self, stream: Stream, parts: Sequence[Buffer], work_item: WorkItem, limit: ProgressLimit
    ) -> None:
        """Send parts in order, divided into pieces that each wait for a slot.

        A piece costs its bytes, at least `MIN_COST_BYTES`. Raises OSError as the stream does, and
        TimeoutError if no slot becomes free in time.
        """
        nbytes = sum(map(len, parts))
        if nbytes <= SMALL_BYTES:
            with self._lock:  # beside other domains, only a few small messages bypass the queue
                bypass = not self._work_slots and (
                    self._bypassing < self._at_once
                    or not self._work_slots.shared(work_item.domain, time.monotonic())
                )
                self._bypassing += bypass
            if bypass:
                try:
                    stream.send(parts, limit)
                finally:
                    with self._lock:  # charged after the send, so that the peer does not wait
                        self._bypassing -= 1
                        self._work_slots.charge(_costing(work_item, nbytes), time.monotonic())
                return
        with self._lock:
            piece_bytes = LARGE_PIECE_BYTES if self._work_slots.empty else PIECE_BYTES
        with contextlib.closing(_MessageLimit(self, stream, work_item, limit)) as slots:
            for piece in pieces([memoryview(part) for part in parts], piece_bytes):
                slots.send(piece)

    def enter(self, work_item: WorkItem) -> None:
        """Wait for a slot; the caller must `leave` it. Raises TimeoutError if none is free."""
        with self._lock:
            if self._work_slots.begin(work_item, time.monotonic()):
                return
            admitted = threading.Event()
            self._work_slots.put(work_item, admitted, time.monotonic())
            self._admit_waiting()
        if admitted.wait(_SLOT_TIMEOUT_S):
            return
        with self._lock:
            if not admitted.is_set():
                self._work_slots.withdraw(work_item, admitted)
                raise TimeoutError(f"no free slot to send within {_SLOT_TIMEOUT_S:g} s")

    def leave(self, work_item: WorkItem, undone: float = 0.0) -> None:
        """Free a slot, and refund the part `undone` of its cost."""
        with self._lock:
            self._work_slots.done(work_item, undone)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while (taken := self._work_slots.take(time.monotonic())) is not None:
            taken[1].set()


class _MessageLimit:
    """The time limit of one message: each piece needs a slot, which a slow peer loses.

    The wait for a slot does not count against the peer.
    """

    def __init__(
        self, scheduler: SendScheduler, stream: Stream, work_item: WorkItem, limit: ProgressLimit
    ) -> None:
        self._scheduler = scheduler
        self._stream = stream
        self._work_item = work_item
        self._limit = limit
        self._left = self._unreported = 0
        self._until: float | None = None
        self._slow = False

    def send(self, piece: Sequence[Buffer]) -> None:
        """Send a piece, in as many slots as its peer needs."""
        self._left = sum(map(len, piece))
        self._stream.send(piece, self)
        self._unreported, self._left, self._slow = self._left, 0, False
        self.close()

    def seconds(self, moved: int) -> float:
        """Wait for the peer and for a slot; return how long the next socket call may block."""
        left_s = self._limit.seconds(moved + self._unreported)
        self._left -= moved
        self._unreported = 0
        now = time.monotonic()
        if self._until is not None and now >= self._until:
            self.close()
            self._slow = True
        if self._until is None:
            while self._slow and not self._stream.drains(min(left_s, SLOT_S)):
                left_s = self._limit.seconds(0)
            self._work_item = _costing(self._work_item, self._left)
            begun = time.monotonic()
            self._scheduler.enter(self._work_item)
            now = time.monotonic()
            self._limit.rest(now - begun)
            self._until = now + SLOT_S
        return min(left_s, max(0.0, self._until - now))

    def close(self) -> None:
        """Free the slot, if one is held."""
        if self._until is not None:
            self._until = None
            self._scheduler.leave(self._work_item, float(self._left))


def _costing(work_item: WorkItem, nbytes: int) -> WorkItem:
    return work_item._replace(cost=float(max(nbytes, MIN_COST_BYTES)))
