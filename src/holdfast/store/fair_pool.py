"""Threads that work for several domains: by turns, in proportion to their shares.

Each domain waits behind itself only, and one that had less than others of the last seconds is
served first. Some threads are spare: they are for domains that come while others have all the rest,
until they have their turns among them.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from holdfast.policy.fair_queue import FairQueue, Terms

T = TypeVar("T")


class Errand(enum.Enum):
    """Why something is read: somebody waits for it, or may want it later."""

    DEMAND = 1.0
    AHEAD = 1 / 16

    @property
    def weight(self) -> float:
        """Its weight beside what else is read for the same domain."""
        return self.value

    @property
    def credit(self) -> float:
        """What part of a domain's credit it may use: none where nobody waits."""
        return float(self is Errand.DEMAND)


class Turn(NamedTuple):
    """Whose work it is, what it costs (in units that are the same for all), and the weight."""

    domain: bytes
    cost: float = 1.0
    share: float = 1.0
    errand: Errand = Errand.DEMAND

    @property
    def flow(self) -> Hashable:
        """What it waits behind."""
        return self.domain, self.errand

    @property
    def terms(self) -> Terms:
        """On what terms it waits."""
        return Terms(self.share * self.errand.weight, self.errand.credit)


class _Task(NamedTuple):
    turn: Turn
    future: Future[object]
    work: Callable[[], object]

    def run(self) -> None:
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # noqa: BLE001  # whoever waits for the result gets it
            self.future.set_exception(error)


class FairPool:
    """`threads` threads by turns, and `spare` ones for those who are first in turn and have few.

    Futures are those of `concurrent.futures`: what has not begun can be cancelled.
    """

    def __init__(
        self, threads: int, spare: int, name: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._usual = threads
        self._threads_max = threads + spare
        self._name = name
        self._now = now
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
            task = _Task(turn, future, work)  # type: ignore[arg-type]
            self._queue.advance(self._now())
            self._queue.put(turn.flow, turn.cost, task, turn.terms)
            if len(self._queue) > self._idle and len(self._threads) < self._threads_max:
                self._begin_thread()
            self._changed.notify()
        return future

    def credit(self, turn: Turn) -> float:
        """Return how much work, by its cost, would be done for a domain before that of others."""
        with self._changed:
            self._queue.advance(self._now())
            return self._queue.credit(turn.flow, turn.terms)

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
            while (task := self._take()) is None:
                if self._closed and not len(self._queue):
                    self._changed.notify_all()
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._running[task.turn.domain] += 1
            return task

    def _take(self) -> _Task | None:
        """Take what may go now; what was cancelled meanwhile counts for nobody."""
        self._queue.advance(self._now())
        while (taken := self._take_turn()) is not None:
            task = taken[1]
            if task.future.set_running_or_notify_cancel():
                return task
            self._queue.refund(task.turn.flow, task.turn.cost, task.turn.terms.share)
        return None

    def _take_turn(self) -> tuple[Hashable, _Task] | None:
        """Beyond the usual threads, only who is first and has fewer than are still spare."""
        queue = self._queue
        if self._running.total() < self._usual:
            return queue.take()
        if not len(queue) or queue.earliest(self._has_few) > queue.earliest():
            return None
        return queue.take(self._has_few)

    def _has_few(self, flow: Hashable) -> bool:
        domain: bytes = flow[0]  # type: ignore[index]
        return self._running[domain] < self._threads_max - self._running.total()
