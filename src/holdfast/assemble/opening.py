"""Open a store on a separate thread, so that no signal handler interrupts the opening.

An exception that a handler raises in the caller ends only the caller's wait. The thread finishes
opening the store, and closes it. See docs/decisions/0020-calls-on-threads-of-the-store.md.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue

from holdfast.store.store import CLOSE_STOP_S, CLOSE_WRITE_S, Store

_CHECK_S = 0.5
"""The caller's wait returns to Python code this often, where signal handlers can run."""

ABANDONED_S = CLOSE_WRITE_S + CLOSE_STOP_S
"""Longest time that an opening waits for an earlier one whose caller was interrupted."""

_running: set[Opening] = set()
_numbers = itertools.count()


class Opening:
    """One call of `holdfast.open`: the caller waits in `result` for the thread that runs `work`."""

    def __init__(self, work: Callable[[], Store]) -> None:
        self._work = work
        self._number = next(_numbers)
        self._done = threading.Lock()
        self._done.acquire()
        self._answered: SimpleQueue[None] = SimpleQueue()
        """Receives an item when the caller has returned or raised."""
        self._abandoned = self._over = False
        self._store: Store | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-open", daemon=True)

    def result(self) -> Store:
        """Return the store, or raise what `work` raises; call once.

        After an exception in this call the store is closed in the background. Later openings of
        this process wait until it is closed, because it may have locked the same folder.
        """
        try:
            self._thread.start()
            while not self._done.acquire(timeout=_CHECK_S):
                continue
            store = self._store
            if store is None:
                error, self._error = self._error, None
                raise error or AssertionError("neither a store nor an error")
            self._answered.put(None)
            return store
        except BaseException:
            self._abandoned = True
            self._answered.put(None)
            if self._over and self._store is not None:
                self._store.close()  # the thread ended before `_abandoned` was set
            raise

    def wait_closed(self, later: Opening) -> None:
        """Wait until this opening ends, if its caller abandoned it and it began before `later`.

        An opening waits for earlier ones only, so that no two wait for each other.
        """
        if self._number < later._number and self._is_abandoned():
            self._thread.join(ABANDONED_S)

    def _is_abandoned(self) -> bool:
        return self._abandoned

    def _run(self) -> None:
        _running.add(self)
        try:
            for other in list(_running):
                other.wait_closed(self)
            if self._is_abandoned():
                return
            try:
                store = self._store = self._work()
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                self._error = error
                self._done.release()
                return
            self._done.release()
            self._answered.get()
            self._over = True
            if self._is_abandoned():
                store.close()
        finally:
            _running.discard(self)
