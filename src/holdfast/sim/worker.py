"""One simulated worker: its own tiers, the links to all it can read from, and its engine."""

from __future__ import annotations

from collections import deque

from holdfast.sim.ladder import EngineModel
from holdfast.sim.memory import Memory


class Engine:
    """Prefills wait in order of readiness and run `prefills_at_once` at a time."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.busy_s = 0.0
        self.backlog_s = 0.0
        """Seconds of prefill that wait or run."""
        self._free = model.prefills_at_once
        self._waiting: deque[tuple[int, float]] = deque()

    @property
    def queue_s(self) -> float:
        """Seconds until what waits and runs is done."""
        return self.backlog_s / self.model.prefills_at_once

    def expect(self, seconds: float) -> None:
        """Note a prefill that will line up."""
        self.backlog_s += seconds

    def arrive(self, request: int, seconds: float) -> list[tuple[int, float]]:
        """Line up a prefill; return the (request, seconds) that start now."""
        self._waiting.append((request, seconds))
        return self._start()

    def leave(self, seconds: float) -> list[tuple[int, float]]:
        """End a prefill that took so long; return the (request, seconds) that start now."""
        self._free += 1
        self.backlog_s -= seconds
        return self._start()

    def _start(self) -> list[tuple[int, float]]:
        started = []
        while self._free and self._waiting:
            self._free -= 1
            started.append(self._waiting.popleft())
            self.busy_s += started[-1][1]
        return started


class Worker:
    """A memory, an engine, the numbers of the links that fill it, and what it has to do."""

    def __init__(self, memory: Memory, engine: Engine, links: list[list[int]]) -> None:
        self.memory = memory
        self.engine = engine
        self.links = links
        """For each tier of the ladder, the links that a block from there moves through."""
        self.line: deque[int] = deque()
        """Requests whose turn to be looked up has not come."""
        self.ahead = 0
        """Requests that were looked up and that the engine has not begun."""
        self.requests = 0
        """Requests between their arrival and their first token."""
