"""A simulated worker: its own tiers, the links it reads over, and its engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from holdfast.sim.ladder import EngineModel
from holdfast.sim.memory import SimulatedMemory


class SimulatedEngine:
    """A FIFO queue of prefills; `prefills_at_once` run concurrently."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.busy_s = 0.0
        self.backlog_s = 0.0
        """Seconds of prefill that are expected, queued or running."""
        self._free = model.prefills_at_once
        self._waiting: deque[tuple[int, float]] = deque()

    @property
    def queue_s(self) -> float:
        """Estimated seconds until all queued and running prefills are done."""
        return self.backlog_s / self.model.prefills_at_once

    def arrive(self, request: int, seconds: float) -> list[tuple[int, float]]:
        """Queue a prefill; return the (request, seconds) that start now."""
        self._waiting.append((request, seconds))
        return self._start()

    def leave(self, seconds: float) -> list[tuple[int, float]]:
        """End a prefill of `seconds`; return the (request, seconds) that start now."""
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


@dataclass
class SimulatedWorker:
    """The memory, engine, links (by number) and queue of one worker."""

    memory: SimulatedMemory
    engine: SimulatedEngine
    links: list[list[int]]
    """For each tier of the ladder, the links that its blocks move over."""
    queue: deque[int] = field(default_factory=deque)
    """Requests that wait for their lookup."""
    ahead: int = 0
    """Number of requests that were looked up and whose prefill has not started."""
    requests: int = 0
    """Number of requests between arrival and first token."""
