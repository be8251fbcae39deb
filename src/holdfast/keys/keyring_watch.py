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

LOOK_WAIT_S = 0.25
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
        self._changed = threading.Condition()
        self._began_s: float | None = None
        """Start of the read that is under way, monotonic; None if there is none."""
        self.read_at = clock.now()
        self.why = ""

    def look_briefly(self) -> None:
        """Start a read and wait for it up to LOOK_WAIT_S; do not wait if an earlier read hangs."""
        if self._ring.path is None:
            return
        until = time.monotonic() + LOOK_WAIT_S
        with self._changed:
            under_way = self._began_s
            if under_way is not None:  # it may have begun before the change that the caller expects
                if time.monotonic() - under_way > LOOK_WAIT_S:
                    return
                if not self._changed.wait_for(lambda: self._began_s != under_way, LOOK_WAIT_S):
                    return
            if self._began_s is None:
                self._began_s = time.monotonic()
                work = threading.Thread(target=self._read, name="holdfast-keyring", daemon=True)
                try:
                    work.start()
                except RuntimeError as error:  # the limit of threads, or of memory for stacks
                    self.why, self._began_s = f"{error}; raise the limit of threads", None
                    self._changed.notify_all()
                    return
            look = self._began_s
            self._changed.wait_for(lambda: self._began_s != look, until - time.monotonic())

    def _read(self) -> None:
        at, why = self._clock.now(), ""
        try:
            self._ring.look()
        except (OSError, FormatError) as error:
            why = str(error) or repr(error)
        except Exception as error:  # noqa: BLE001  # otherwise the file is never read again
            _log.exception("the key ring cannot be read")
            why = repr(error)
        with self._changed:
            self.why, self._began_s = why, None
            if not why:
                self.read_at = at
            self._changed.notify_all()
