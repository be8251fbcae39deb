"""A thread pool that divides its threads fairly between domains, by weight.

A domain that used less than others in the last seconds is served first. Reserved threads serve
domains that arrive while other domains occupy all regular threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from holdfast.fairness.fair_queue import WorkItem
from holdfast.fairness.work_slots import WorkSlots

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Task(NamedTuple):
    work_item: WorkItem
    future: Future[object]
    work: Callable[[], object]


def _log_failure(ended: Future[object]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        _log.error("work in the background failed", exc_info=error)


class FairThreads:
    """`threads` regular and `spare` reserved threads; see `work_slots` for which work runs next.

    Futures are those of `concurrent.futures`: work that has not begun can be cancelled.
    """

    def __init__(
        self, threads: int, spare: int, name: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads_max = threads + spare
        self._name = name
        self._now = now
        self._threads: list[threading.Thread] = []
        self._running: dict[threading.Thread, _Task] = {}
        """What each thread runs now; without the threads that were given up."""
        self._work_slots: WorkSlots[_Task] = WorkSlots(threads, spare)
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def submit(self, work_item: WorkItem, work: Callable[[], T]) -> Future[T]:
        """Queue work and return its future.

        Raises RuntimeError after `shutdown`, and if no thread runs and none can be started; then
        the work never begins.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name}: no work is accepted after shutdown")
            task = _Task(work_item, future, work)  # type: ignore[arg-type]
            self._work_slots.put(work_item, task, self._now())
            try:
                self._start_thread()
            except RuntimeError:
                if not self._threads:
                    self._work_slots.withdraw(work_item, task)
                    raise
            self._changed.notify()
        return future

    def run_unawaited(self, work_item: WorkItem, work: Callable[[], object]) -> None:
        """Queue work whose result no caller awaits: an error of it is logged.

        Raises RuntimeError as `submit` does.
        """
        self.submit(work_item, work).add_done_callback(_log_failure)

    def raise_priority(self, domain: bytes, future: Future[T]) -> None:
        """Raise a domain's work that has not begun from prefetch to demand priority."""
        with self._changed:
            self._work_slots.raise_priority(domain, lambda task: task.future is future, self._now())

    def credit(self, work_item: WorkItem) -> float:
        """Return the cost of work that a domain could have served ahead of others now."""
        with self._changed:
            return self._work_slots.credit(work_item, self._now())

    def shared(self, domain: bytes) -> bool:
        """Return whether other domains had work here in the last `SEEN_S` seconds."""
        with self._changed:
            return self._work_slots.shared(domain, self._now())

    def give_up_running(self) -> None:
        """Count work under way as ended, because it may never return: of a drive that hangs.

        Waiting work gets new threads. The former ones end with their work, whose futures and
        buffers are theirs until then; `shutdown` does not wait for them.
        """
        with self._changed:
            for thread, task in self._running.items():
                self._threads.remove(thread)
                self._work_slots.done(task.work_item)
            given_up = len(self._running)
            self._running.clear()
            with contextlib.suppress(RuntimeError):  # none can be started: `submit` tries again
                for _ in range(given_up):
                    self._start_thread()
            self._changed.notify_all()

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Accept no more work and wait for the rest; `cancel_futures` cancels waiting work."""
        with self._changed:
            self._closed = True
            for task in self._work_slots.clear() if cancel_futures else ():
                task.future.cancel()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _start_thread(self) -> None:
        """Start a thread if work waits for one; raise RuntimeError if none can be started."""
        if len(self._work_slots) > self._idle and len(self._threads) < self._threads_max:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        this = threading.current_thread()
        while (task := self._next()) is not None:
            try:
                task.future.set_result(task.work())
            except BaseException as error:  # noqa: BLE001  # the future's waiter gets it
                task.future.set_exception(error)
            with self._changed:
                if self._running.pop(this, None) is None:  # it was given up
                    return
                self._work_slots.done(task.work_item)
                self._changed.notify()
            del task

    def _next(self) -> _Task | None:
        """Wait for the next work item; None after shutdown."""
        with self._changed:
            while (task := self._take()) is None:
                if self._closed and not len(self._work_slots):
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._running[threading.current_thread()] = task
            return task

    def _take(self) -> _Task | None:
        """Take the next work that may run; refund work that was cancelled in the queue."""
        while (taken := self._work_slots.take(self._now())) is not None:
            work_item, task = taken
            if task.future.set_running_or_notify_cancel():
                return task
            self._work_slots.done(work_item, undone=work_item.cost)
        return None
