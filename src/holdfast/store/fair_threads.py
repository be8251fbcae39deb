"""Threads that work for several domains: by turns, in proportion to their shares.

Each domain waits behind itself only, and one that had less than others of the last seconds is
served first. Some threads are spare: they are for domains that come while others have all the rest,
until they have their turns among them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from holdfast.policy.turns import Turn, Turns

T = TypeVar("T")


class _Task(NamedTuple):
    turn: Turn
    future: Future[object]
    work: Callable[[], object]

    def run(self) -> None:
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # noqa: BLE001  # whoever waits for the result gets it
            self.future.set_exception(error)


class FairThreads:
    """`threads` threads by turns, and `spare` ones for those who are first in turn and have few.

    Futures are those of `concurrent.futures`: what has not begun can be cancelled.
    """

    def __init__(
        self, threads: int, spare: int, name: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads_max = threads + spare
        self._name = name
        self._now = now
        self._threads: list[threading.Thread] = []
        self._turns: Turns[_Task] = Turns(threads, spare)
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def submit(self, turn: Turn, work: Callable[[], T]) -> Future[T]:
        """Have work done when its turn comes.

        Raises RuntimeError after `shutdown`, and where there is no thread and none can be had; then
        the work is never begun.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name}: no work is taken after shutdown")
            task = _Task(turn, future, work)  # type: ignore[arg-type]
            self._turns.put(turn, task, self._now())
            if len(self._turns) > self._idle and len(self._threads) < self._threads_max:
                try:
                    self._begin_thread()
                except RuntimeError:
                    if not self._threads:
                        self._turns.withdraw(turn, task)
                        raise
            self._changed.notify()
        return future

    def hurry(self, turn: Turn, future: Future[T]) -> None:
        """Somebody waits by now for what was submitted for later: do it in turn, unless begun."""
        with self._changed:
            self._turns.hurry(turn, lambda task: task.future is future, self._now())

    def credit(self, turn: Turn) -> float:
        """Return how much work, by its cost, would be done for a domain before that of others."""
        with self._changed:
            return self._turns.credit(turn, self._now())

    def shared(self, domain: bytes) -> bool:
        """Return whether other domains had work here lately."""
        with self._changed:
            return self._turns.shared(domain, self._now())

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take no more, and wait for the end of what is here; what has not begun may be dropped."""
        with self._changed:
            self._closed = True
            for task in self._turns.clear() if cancel_futures else ():
                task.future.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _begin_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task.run()
            with self._changed:
                self._turns.done(task.turn)
                self._changed.notify()
            del task

    def _next(self) -> _Task | None:
        """Wait for work whose turn it is; None at the end."""
        with self._changed:
            while (task := self._take()) is None:
                if self._closed and not len(self._turns):
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return task

    def _take(self) -> _Task | None:
        """Take what may go now; what was cancelled meanwhile counts for nobody."""
        while (taken := self._turns.take(self._now())) is not None:
            turn, task = taken
            if task.future.set_running_or_notify_cancel():
                return task
            self._turns.done(turn, undone=turn.cost)
        return None
