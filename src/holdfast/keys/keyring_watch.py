"""Read a key ring's file periodically in its own thread, because its file system may hang.

A serving thread waits for a read only briefly, and uses the time of the last successful read.
"""

from __future__ import annotations

import logging
import threading
import time

from holdfast.clock import Clock
from holdfast.errors import FormatError
from holdfast.keys.keyring import KeyRing

GLANCE_S = 0.25
"""Longest wait for a read of the file."""

_log = logging.getLogger("holdfast.store")


class KeyRingWatch:
    """Reads a ring's file on request; concurrent callers share one read.

    `read_at` is the time, by the store's clock, at which the last successful read began. `why` is
    the error of the latest read; empty if it succeeded.
    """

    def __init__(self, ring: KeyRing, clock: Clock) -> None:
        self._ring = ring
        self._clock = clock
        self._lock = threading.Lock()
        self._look: _Look | None = None
        self.read_at = clock.now()
        self.why = ""

    def glance(self) -> None:
        """Start a read and wait for it up to GLANCE_S; do not wait if an earlier read hangs."""
        if self._ring.path is None:
            return
        until = time.monotonic() + GLANCE_S
        with self._lock:
            under_way = self._look
        if under_way is not None:  # it may have begun before the change that the caller looks for
            if time.monotonic() - under_way.began > GLANCE_S:
                return
            if not under_way.over.wait(max(0.0, until - time.monotonic())):
                return
        with self._lock:
            look = self._look
            if look is None:
                look = self._look = _Look()
                work = threading.Thread(
                    target=self._read, args=(look,), name="holdfast-keyring", daemon=True
                )
                try:
                    work.start()
                except RuntimeError as error:  # the limit of threads, or of memory for stacks
                    self.why, self._look = f"{error}; raise the limit of threads", None
                    look.over.set()
        look.over.wait(max(0.0, until - time.monotonic()))

    def _read(self, look: _Look) -> None:
        at, why = self._clock.now(), ""
        try:
            self._ring.look()
        except (OSError, FormatError) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  # otherwise the file is never read again
            _log.exception("the key ring cannot be read")
            why = str(error)
        with self._lock:
            self.why, self._look = why, None
            if not why:
                self.read_at = at
        look.over.set()


class _Look:
    """One read of the file: its start, in seconds, monotonic, and whether it has ended."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.over = threading.Event()
