"""Fetches of encoder outputs for vLLM's scheduler, which must not wait.

vLLM computes an item, or is told that it comes from outside, and then it must come: there is no way
back. So an item counts as available only when its bytes are here and verified.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from holdfast.engines.vllm.encoder.items import EncoderItem, load_item
from holdfast.limits import MIB
from holdfast.named_blocks import NamedSession
from holdfast.workers import workers

FETCH_THREADS = 2
READY_BYTES_MAX = 256 * MIB
"""Memory for items that were fetched and that no step has used yet."""

MISSED_S = 5.0
"""How long an item that was not found is not asked for again."""

MISSED_MAX = 4096

_log = logging.getLogger("vllm.holdfast")


class ItemFetches:
    """Items by name: being fetched, ready, or not found lately. Thread-safe."""

    def __init__(
        self,
        session: NamedSession,
        deadline_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s`: longest time for which a request waits for an item."""
        self._session = session
        self._deadline_s = deadline_s
        self._now = now
        self._lock = threading.Lock()
        self._threads = workers(FETCH_THREADS, "holdfast-encoder-load")
        self._began_s: dict[bytes, float] = {}
        self._ready: OrderedDict[bytes, EncoderItem] = OrderedDict()
        self._missed_s: OrderedDict[bytes, float] = OrderedDict()

    def ask(self, name: bytes, rows: int) -> bool:
        """Return whether it is known if an item of `rows` vectors is here; else begin to fetch it.

        True also if a fetch takes too long: then the item is computed.
        """
        with self._lock:
            if name in self._ready or self._is_missed(name):
                return True
            began_s = self._began_s.get(name)
            if began_s is not None:
                return self._now() - began_s > self._deadline_s
            self._began_s[name] = self._now()
        self._threads.submit(self._fetch, name, rows)
        return False

    def take(self, name: bytes) -> EncoderItem | None:
        """Return an item that is here, and forget it."""
        with self._lock:
            return self._ready.pop(name, None)

    def keep(self, items: Mapping[bytes, EncoderItem]) -> None:
        """Take back items that were not used."""
        with self._lock:
            self._ready.update(items)
            self._bound_ready()

    def close(self) -> None:
        """End after the fetches in progress."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, name: bytes, rows: int) -> None:
        item = None
        try:
            item = load_item(self._session, name, self._deadline_s)
        except Exception:  # noqa: BLE001  # the encoder computes it
            _log.exception("an encoder output was not fetched; it is computed")
        with self._lock:
            del self._began_s[name]
            if item is not None and item.rows == rows:
                self._ready[name] = item
                self._bound_ready()
                return
            self._missed_s[name] = self._now()
            while len(self._missed_s) > MISSED_MAX:
                self._missed_s.popitem(last=False)

    def _bound_ready(self) -> None:
        """Forget the oldest items beyond the memory for them; the lock is held."""
        total = sum(len(item.data) for item in self._ready.values())
        while total > READY_BYTES_MAX:
            _, dropped = self._ready.popitem(last=False)
            total -= len(dropped.data)

    def _is_missed(self, name: bytes) -> bool:
        missed_s = self._missed_s.get(name)
        if missed_s is None:
            return False
        if self._now() - missed_s <= MISSED_S:
            return True
        del self._missed_s[name]
        return False
