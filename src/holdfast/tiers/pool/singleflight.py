"""Many who want the same thing at once share one reading of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


class _Flight(Generic[Value]):
    def __init__(self) -> None:
        self.landed = threading.Event()
        self.values: list[Value] = []
        self.error: Exception | None = None
        self.waiting = 0


class SingleFlight(Generic[Name, Value]):
    """Shares readings by name, between threads of one process.

    Nothing is kept: who asks after a reading has ended starts another. So look in the place that
    the reading fills before asking, and again inside `read`; then a miss is read once.
    """

    def __init__(self) -> None:
        self._flights: dict[Name, _Flight[Value]] = {}
        self._lock = threading.Lock()
        self.led = 0
        self.shared = 0

    def share(self, name: Name, read: Callable[[], Value], timeout_s: float, late: Value) -> Value:
        """Return what `read()` returns: ours, or that of the thread that is at it already.

        Only waiting for another's is bounded by `timeout_s`, after which `late` is returned, as
        it is when the other thread was interrupted; `read` has deadlines of its own. An error of
        `read` is raised to all who share it.
        """
        with self._lock:
            flight = self._flights.get(name)
            leads = flight is None
            if flight is None:
                flight = self._flights[name] = _Flight()
                self.led += 1
            else:
                flight.waiting += 1
                self.shared += 1
        if leads:
            return self._lead(name, flight, read)
        if not flight.landed.wait(timeout_s):
            return late
        if flight.error is not None:
            raise flight.error
        return flight.values[0] if flight.values else late

    def waiting(self, name: Name) -> int:
        """Return how many have joined the reading of `name` that is under way."""
        with self._lock:
            flight = self._flights.get(name)
            return flight.waiting if flight else 0

    def _lead(self, name: Name, flight: _Flight[Value], read: Callable[[], Value]) -> Value:
        try:
            value = read()
            flight.values.append(value)
            return value
        except Exception as error:
            flight.error = error
            raise
        finally:
            # Off the list first: whoever comes now must not join what has ended.
            with self._lock:
                del self._flights[name]
            flight.landed.set()
