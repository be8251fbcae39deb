"""Saves of encoder outputs, on a thread of their own: no step of the engine waits for the node."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from queue import SimpleQueue

from holdfast.engines.vllm.encoder.items import EncoderItem, save_item
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.named_blocks import NamedSession

QUEUED_BYTES_MAX = 256 * MIB
"""Memory for items that wait to be saved; others are not saved."""

SAVED_MAX = 65_536
"""Names of items that are remembered as saved."""

_log = logging.getLogger("vllm.holdfast")


class ItemSaves:
    """Saves items in their order, each once. One thread calls `put`."""

    def __init__(self, session: NamedSession) -> None:
        self._session = session
        self._queue: SimpleQueue[tuple[bytes, EncoderItem] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._saved: OrderedDict[bytes, None] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="holdfast-encoder-save", daemon=True)
        self._thread.start()

    def is_saved(self, name: bytes) -> bool:
        """Return whether an item was saved, is about to be, or was fetched from the store."""
        with self._lock:
            return name in self._saved

    def note_saved(self, name: bytes) -> None:
        """Remember that the store holds an item."""
        with self._lock:
            self._saved[name] = None
            if len(self._saved) > SAVED_MAX:
                self._saved.popitem(last=False)

    def put(self, name: bytes, item: EncoderItem) -> None:
        """Queue an item, unless too many wait."""
        with self._lock:
            if self._queued_bytes + len(item.data) > QUEUED_BYTES_MAX:
                return
            self._queued_bytes += len(item.data)
        self.note_saved(name)
        self._queue.put((name, item))

    def close(self) -> None:
        """Save what is queued, and end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            name, item = queued
            outcome = Outcome.GONE
            try:
                outcome = save_item(self._session, name, item)
                if outcome is not Outcome.OK:
                    _log.info("an encoder output was not saved: %s", outcome)
            except Exception:  # noqa: BLE001  # it is computed again
                _log.exception("an encoder output was not saved")
            with self._lock:
                self._queued_bytes -= len(item.data)
                if outcome is not Outcome.OK:  # it is saved when it is computed again
                    self._saved.pop(name, None)
