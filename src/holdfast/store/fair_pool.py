"""Threads that work for several domains: by turns, in proportion to their shares.

Each domain waits behind itself only. Some threads are spare: they are for a domain that comes
while others have all the rest, until it has its turns among them.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from holdfast.policy.fair_queue import FairQueue

T = TypeVar("T")


class Errand(enum.Enum):
    """Why something is read: somebody waits for it, or may want it later."""

    DEMAND = 1.0
    AHEAD = 1 / 16

    @property
    def weight(self) -> float:
        """Its weight beside what else is read for the same domain."""
        return self.value


class Turn(NamedTuple):
    """Whose work it is, what it costs (in units that are the same for all), and the weight."""

    domain: bytes
    cost: float = 1.0
    share: float = 1.0
    errand: Errand = Errand.DEMAND


class _Task(NamedTuple):
    turn: Turn
    future: Future[object]
    work: Callable[[], object]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # noqa: BLE001  # whoever waits for the result gets it
            self.future.set_exception(error)


class FairPool:
    """`threads` threads by turns, and `spare` ones for whoever is first in turn and has none.

    Futures are those of `concurrent.futures`: what has not begun can be cancelled.
    """

    def __init__(self, threads: int, spare: int, name: str) -> None:
        self._usual = threads
        self._threads_max = threads + spare
        self._name = name
        self._threads: list[threading.Thread] = []
        self._queue: FairQueue[_Task] = FairQueue()
        self._running: Counter[bytes] = Counter()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def submit(self, turn: Turn, work: Callable[[], T]) -> Future[T]:
        """Have work done when its turn comes. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name}: no work is taken after shutdown")
            flow = (turn.domain, turn.errand)
            task = _Task(turn, future, work)  # type: ignore[arg-type]
            self._queue.put(flow, turn.cost, task, turn.share * turn.errand.weight)
            if len(self._queue) > self._idle and len(self._threads) < self._threads_max:
                self._begin_thread()
            self._changed.notify()
        return future

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take no more, and wait for the end of what is here; what has not begun may be dropped."""
        with self._changed:
            self._closed = True
            while cancel_futures and (turn := self._queue.take()) is not None:
                turn[1].future.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _begin_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
        self._threads[-1].start()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task.run()
            with self._changed:
                self._running[task.turn.domain] -= 1
                if not self._running[task.turn.domain]:
                    del self._running[task.turn.domain]
                self._changed.notify()
            del task

    def _next(self) -> _Task | None:
        """Wait for work whose turn it is; None at the end."""
        with self._changed:
            while (turn := self._take()) is None:
                if self._closed and not len(self._queue):
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._running[turn[1].turn.domain] += 1
            return turn[1]

    def _take(self) -> tuple[Hashable, _Task] | None:
        """Take what may go now: beyond the usual threads, only who has none and is first."""
        queue = self._queue
        if self._running.total() < self._usual:
            return queue.take()
        if not len(queue) or queue.earliest(self._has_none) > queue.earliest():
            return None
        return queue.take(self._has_none)

    def _has_none(self, flow: Hashable) -> bool:
        domain: bytes = flow[0]  # type: ignore[index]
        return not self._running[domain]
