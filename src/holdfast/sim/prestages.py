"""The prestages of one simulated worker, which begin in the order in which those of a node do."""

from __future__ import annotations

from holdfast.plan.prestage import BEGUN_S, PrestageTimes, in_order


class WorkerPrestages:
    """Prestages that are due, and those in progress, by number.

    All are counted as reads of the tier below host memory.
    """

    def __init__(self) -> None:
        self._due: dict[int, PrestageTimes] = {}
        self._begun: dict[int, PrestageTimes] = {}

    def add(self, number: int, times: PrestageTimes) -> None:
        """Note that a prestage is due."""
        self._due[number] = times

    def take(self, now_s: float) -> list[int]:
        """Return the prestages that begin now; call `done` once for each."""
        taken, order = list[int](), in_order(self._due, now_s)
        self._due = {number: self._due[number] for number in order}  # the others are too late
        for number in order:
            if sum(times.fetch_s for times in self._begun.values()) >= BEGUN_S:
                break
            self._begun[number] = self._due.pop(number)
            taken.append(number)
        return taken

    def done(self, number: int) -> None:
        """Note that a prestage has ended."""
        del self._begun[number]
