"""Events: each change of a copy's state, numbered, for listeners outside the store's lock.

The store records events under its lock; one thread delivers them, in order. A listener that is
added sees every change after that, and none from before.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.index.residency import Residency

EVENTS_MAX = 1 << 17
"""Maximum events that wait for delivery. Later ones are lost until there is room again; a listener
sees the gap in the numbers."""

EVENTS_AT_ONCE = 1_024
"""Maximum events passed to a listener in one call."""

CLOSE_S = 5.0
"""Longest time that `close` waits for the delivery of what was recorded, in seconds."""

_log = logging.getLogger("holdfast.store")


class CopyState(enum.Enum):
    """State of a block's copy on one tier.

    FILLING: its record is being written there. HELD: it can be read there. LEAVING: it can still be
    read there, and the tier has named it as one that it evicts next.
    """

    ABSENT = "absent"
    FILLING = "filling"
    HELD = "held"
    LEAVING = "leaving"


class CopyEvent(NamedTuple):
    """A copy of a block changed its state.

    `sequence` counts all changes since the first listener was added; a gap means that events were
    lost, so that the listener must look at the store again. `tier` 0 is the host. `stored_bytes`:
    the size of the copy on its tier, that of a slot if it is not known.
    """

    sequence: int
    namespace: Namespace
    key: bytes
    tier: int
    before: CopyState
    after: CopyState
    stored_bytes: int


CopyListener: TypeAlias = Callable[[Sequence[CopyEvent]], object]
"""Called with events in order, by one thread, without a lock. It must return soon: the other
listeners wait. An exception is logged."""


class CopyEvents:
    """The events of one store, and their listeners.

    `record`, `subscribe` and `unsubscribe` are called under the store's lock.
    """

    def __init__(self, index: Residency) -> None:
        self._index = index
        self._queue: SimpleQueue[CopyEvent | Callable[[], object] | None] = SimpleQueue()
        self._listeners: list[CopyListener] = []
        """Of the delivering thread, which alone uses it."""
        self._failing: list[CopyListener] = []
        """Listeners whose last call raised; of the delivering thread, too."""
        self._subscribed: list[CopyListener] = []
        self._thread: threading.Thread | None = None
        self.sequence = 0
        """Number of the last event."""
        self.lost = 0
        """Events that were not delivered, because too many waited."""

    @property
    def wanted(self) -> int:
        """Number of listeners; without one, nothing is recorded."""
        return len(self._subscribed)

    def record(self, row: int, tier: int, before: CopyState, after: CopyState) -> None:
        """Record that the copy of a row changed; without a listener, do nothing."""
        if not self._subscribed:
            return
        self.sequence += 1
        if self._queue.qsize() >= EVENTS_MAX:
            self.lost += 1
            return
        index = self._index
        key, size = index.keys[row] or b"", index.stored_bytes(row, tier)
        namespace = index.namespace(row)
        self._queue.put(CopyEvent(self.sequence, namespace, key, tier, before, after, size))

    def subscribe(self, listener: CopyListener) -> None:
        """Call a listener with every event from now on."""
        self._subscribed.append(listener)
        self._queue.put(lambda: self._listeners.append(listener))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-events", daemon=True)
            self._thread.start()

    def unsubscribe(self, listener: CopyListener) -> None:
        """Call a listener with no event that is recorded from now on; it may be none already."""
        if listener not in self._subscribed:
            return
        self._subscribed.remove(listener)
        self._queue.put(lambda: self._forget(listener))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all events recorded so far are delivered; call it without the store's lock.

        Returns False if they are not by then.
        """
        if self._thread is None or not self._thread.is_alive():
            return True
        delivered = threading.Event()
        self._queue.put(delivered.set)
        return delivered.wait(timeout_s)

    def close(self) -> None:
        """Deliver what was recorded, and end the thread; waits for `CLOSE_S` at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        events = list[CopyEvent]()
        while True:
            try:
                item = self._queue.get(block=not events)
            except Empty:
                self._deliver(events)
                continue
            if isinstance(item, CopyEvent):
                events.append(item)
                if len(events) == EVENTS_AT_ONCE:
                    self._deliver(events)
                continue
            self._deliver(events)
            if item is None:
                return
            item()

    def _deliver(self, events: list[CopyEvent]) -> None:
        """Pass events to every listener, and empty the list."""
        if not events:
            return
        batch = tuple(events)
        events.clear()
        for listener in list(self._listeners):
            try:
                listener(batch)
            except Exception:  # noqa: BLE001  # the other listeners get theirs
                if listener not in self._failing:
                    self._failing.append(listener)
                    _log.exception("a listener to changes of copies failed; it is called again")
            else:
                if listener in self._failing:
                    self._failing.remove(listener)

    def _forget(self, listener: CopyListener) -> None:
        self._listeners.remove(listener)
        if listener in self._failing:
            self._failing.remove(listener)
