"""Reads a key ring's file in a thread of its own: the file system that it is on may hang for ever.

Whoever serves waits for that a moment only, and goes by the time of the last good read.
"""

from __future__ import annotations

import logging
import threading
import time

from holdfast.clock import Clock
from holdfast.errors import FormatError
from holdfast.store.keyring import KeyRing

GLANCE_S = 0.25
"""How long somebody waits for the file at most; one that is read sooner has been read then."""

_log = logging.getLogger("holdfast.store")


class RingWatch:
    """Looks at a ring's file when asked to; one look at a time, however many ask.

    `read_at` is the time at which the last look that went well was begun, by the store's clock;
    `why` says what went wrong since, if something did.
    """

    def __init__(self, ring: KeyRing, clock: Clock) -> None:
        self._ring = ring
        self._clock = clock
        self._lock = threading.Lock()
        self._look: _Look | None = None
        self.read_at = clock.now()
        self.why = ""

    def glance(self) -> None:
        """Have the file read; wait for it a moment, and not at all where it hangs already."""
        if self._ring.path is None:
            return
        until = time.monotonic() + GLANCE_S
        with self._lock:
            under_way = self._look
        if under_way is not None:  # it may have begun before what the caller wants to know of
            if time.monotonic() - under_way.began > GLANCE_S:
                return
            if not under_way.over.wait(max(0.0, until - time.monotonic())):
                return
        with self._lock:
            look = self._look
            if look is None:
                look = self._look = _Look()
                self._begin(look)
        look.over.wait(max(0.0, until - time.monotonic()))

    def _begin(self, look: _Look) -> None:
        """Read in a thread; under the lock. One that can not be had is a read that went wrong."""
        work = threading.Thread(
            target=self._read, args=(look,), name="holdfast-keyring", daemon=True
        )
        try:
            work.start()
        except RuntimeError as error:  # the limit of processes, or of memory for stacks
            self.why, self._look = f"{error}; raise the limit of threads", None
            look.over.set()

    def _read(self, look: _Look) -> None:
        at, why = self._clock.now(), ""
        try:
            self._ring.look()
        except (OSError, FormatError) as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  # or nobody would ever look again
            _log.exception("the key ring can not be read")
            why = str(error)
        with self._lock:
            self.why, self._look = why, None
            if not why:
                self.read_at = at
        look.over.set()


class _Look:
    """One look at the file: when it began, by the machine's clock, and whether it is over."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.over = threading.Event()
