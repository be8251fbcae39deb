"""Run calls of a store's users on threads of the store, which no signal handler interrupts.

CPython runs signal handlers in the main thread, between two bytecodes. An exception that a handler
raises there may leave a lock held or a change of state half done, whatever `try` stands around it.
So the caller's thread only hands a call over and waits; what the call changes is changed by a
worker. If the caller is interrupted, the worker finishes the call, and gives back what the caller
did not receive. See docs/decisions/0020-calls-on-threads-of-the-store.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from holdfast.errors import StoreClosedError

T = TypeVar("T")

CALLS_MAX = 64
"""Calls that run at the same time; further ones wait."""

_IDLE_THREADS_MAX = 4
_CHECK_S = 0.5
"""A caller looks this often whether the workers have ended."""

_CLOSED = "this store was closed before the call began; open it again"

_log = logging.getLogger("holdfast.store")


class CallHandle(Generic[T]):
    """Holds what a call handed out until the caller has received it or used it up.

    If the handle is deleted with the value still in it, because an exception ended the caller's
    function, `undo` is called with the value.
    """

    __slots__ = ("__weakref__", "given", "guard", "undo")

    def __init__(self, undo: Callable[[T], object]) -> None:
        self.given: list[T] = []
        """The value, if a call has handed one out and it was not taken."""
        self.undo = undo
        self.guard: _Guard | None = None
        """Deleted with the handle, and queued then; see `OwnThreadCalls`."""

    def take(self) -> list[T]:
        """Return the value, in a list, and end the duty to undo; empty if it was undone."""
        self.guard = None
        return _taken(self.given)


class DirectCalls:
    """Runs the calls of a store's users in the callers' threads.

    For callers that no exception interrupts: a node, whose event loop takes signals. A subclass may
    run them on other threads, which `close` and `give_up_copy` end.
    """

    def run(self, work: Callable[[], T], handle: CallHandle[T] | None = None) -> T:
        """Return what `work` returns, or raise what it raises; note it in the handle first."""
        result = work()
        if handle is not None:
            handle.given.append(result)
        return result

    def give_up(self, handle: CallHandle[T]) -> None:
        """Undo what a handle holds now, not only when the handle is deleted."""
        for value in _taken(handle.given):
            handle.undo(value)

    def close(self, timeout_s: float) -> None:
        """End the threads that run calls, of which there are none here."""

    def give_up_copy(self) -> None:
        """End the calls of a store's copy in a forked child; there is nothing to end here."""


class _Guard(weakref.ref[CallHandle[Any]]):
    """A reference to a handle, with what is needed to undo when the handle is deleted."""

    __slots__ = ("given", "undo")

    given: list[Any]
    undo: Callable[[Any], object]


class _Call:
    __slots__ = ("done", "error", "guard", "result", "work")

    def __init__(self, work: Callable[[], object], guard: _Guard | None) -> None:
        self.work = work
        self.guard = guard
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class OwnThreadCalls(DirectCalls):
    """Runs calls on worker threads. There is always a worker that waits for the next call."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Call | _Guard | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idents = set[int]()
        self._idle = self._threads = 0
        self._closed = False
        self._begin_thread()

    def run(self, work: Callable[[], T], handle: CallHandle[T] | None = None) -> T:
        if threading.get_ident() in self._idents:
            return super().run(work, handle)
        if self._closed:
            raise StoreClosedError(_CLOSED)
        guard = None
        if handle is not None:  # when it is deleted, the guard is queued: without Python code
            guard = _Guard(handle, self._queue.put)
            guard.given, guard.undo = handle.given, handle.undo
            handle.guard = guard
        call = _Call(work, guard)
        self._queue.put(call)
        while not call.done.acquire(timeout=_CHECK_S):
            if not self._threads:
                if call.done.acquire(blocking=False):
                    break
                raise StoreClosedError(_CLOSED)
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[no-any-return]  # what `work` returned

    def give_up(self, handle: CallHandle[T]) -> None:
        """Undo what a handle holds; while its call is under way, the worker does so afterwards."""
        with contextlib.suppress(StoreClosedError):  # nothing is left to undo then
            self.run(partial(super().give_up, handle))

    def close(self, timeout_s: float) -> None:
        """Take no more calls and wait for those under way, at most `timeout_s`; 0: not at all."""
        until = time.monotonic() + timeout_s
        self._closed = True
        self._queue.put(None)
        while self._threads and time.monotonic() < until:
            time.sleep(0.001)
        if self._threads and timeout_s:
            _log.warning("closing: %d calls did not end within %g s", self._threads, timeout_s)

    def give_up_copy(self) -> None:
        """Take no more calls, in a forked child, where there are no workers."""
        self._closed = True
        self._threads = 0

    def _begin_thread(self) -> None:
        """Start a worker; call under the lock, or before there is another thread."""
        thread = threading.Thread(target=self._work, name="holdfast-call", daemon=True)
        self._idle += 1
        self._threads += 1
        try:
            thread.start()
        except RuntimeError:
            self._idle -= 1
            self._threads -= 1
            if not self._threads:
                raise

    def _work(self) -> None:
        self._idents.add(threading.get_ident())
        try:
            while (item := self._queue.get()) is not None:
                with self._lock:
                    self._idle -= 1
                    if not self._idle and self._threads < CALLS_MAX and not self._closed:
                        self._begin_thread()
                self._do(item)
                del item
                with self._lock:
                    self._idle += 1
                    if self._idle > _IDLE_THREADS_MAX and not self._closed:
                        break
            else:
                self._queue.put(None)  # for the next worker
        finally:
            self._idents.discard(threading.get_ident())
            with self._lock:
                self._idle -= 1
                self._threads -= 1

    def _do(self, item: _Call | _Guard) -> None:
        if isinstance(item, _Guard):
            try:
                for value in _taken(item.given):
                    item.undo(value)
            except Exception:  # noqa: BLE001  # no caller waits for this
                _log.exception("what an interrupted call held could not be given back")
            return
        guard = item.guard
        try:
            item.result = item.work()
            if guard is not None:
                guard.given.append(item.result)
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            item.error = error
        item.done.release()
        if guard is not None and guard() is None:
            self._do(guard)


def _taken(given: list[T]) -> list[T]:
    """Take what is left of what a call handed out; of several threads, one gets it."""
    try:
        return [given.pop()]
    except IndexError:
        return []
