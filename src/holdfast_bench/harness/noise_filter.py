"""Noise filter: the CPU share of other processes beside each sample, and samples with a low one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

DISTURBED = 0.05
"""Largest share of the machine's CPU time that other processes may use beside a sample."""

T = TypeVar("T")

_KERNEL = "kthreadd"
"""Parent of the kernel's own threads; a container does not show them."""

_TICKS = os.sysconf("SC_CLK_TCK")


class RunningTask(NamedTuple):
    """A process: name, parent id, and CPU seconds of it and of its ended children."""

    name: str
    parent: int
    seconds: float


class OtherProcesses:
    """Measures the CPU time of processes that are neither this process nor its descendants.

    CPU time stolen by the hypervisor counts; kernel threads do not. The filter does not use the
    samples' own values, so that leaving a sample out does not bias the figure.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cores = os.cpu_count() or 1
        self._at_s, self._others_s = time.monotonic(), self._read()

    def share(self) -> float:
        """Return the share of all cores' time that other processes used since the last call."""
        before_s, others_before_s = self._at_s, self._others_s
        self._at_s, self._others_s = time.monotonic(), self._read()
        passed_s = self._cores * (self._at_s - before_s)
        return max(0.0, self._others_s - others_before_s) / passed_s if passed_s > 0 else 0.0

    def _read(self) -> float:
        user, nice, system, _, _, _, _, stolen = (
            int(ticks) / _TICKS for ticks in (self._proc / "stat").read_text().split()[1:9]
        )
        ours_s = sum(task.seconds for task in _ours(self._tasks()).values())
        return user + nice + system + stolen - ours_s

    def _tasks(self) -> dict[int, RunningTask]:
        tasks = {}
        for folder in self._proc.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                named, _, rest = (folder / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has ended since it was listed
            name, fields = named.partition("(")[2], rest.split()
            seconds = sum(map(int, fields[11:15])) / _TICKS
            tasks[int(folder.name)] = RunningTask(name, int(fields[1]), seconds)
        return tasks


def least_disturbed(samples: Sequence[tuple[T, float]], least: int) -> list[T]:
    """Return the samples whose share of other processes is at most `DISTURBED`, in their order.

    Each sample is given with that share. If fewer than `least` samples qualify, the `least` samples
    with the lowest shares are returned.
    """
    shares = sorted(share for _, share in samples)[:least]
    limit = max(DISTURBED, *shares) if shares else DISTURBED
    return [sample for sample, share in samples if share <= limit]


def _ours(tasks: Mapping[int, RunningTask]) -> dict[int, RunningTask]:
    """Return this process, its descendants, and the kernel's threads, by process id."""
    roots = {pid for pid, task in tasks.items() if task.name == _KERNEL} | {os.getpid()}
    ours: dict[int, RunningTask] = {}
    for pid, task in tasks.items():
        seen, ancestor = set[int](), pid
        while ancestor in tasks and ancestor not in roots and ancestor not in seen:
            seen.add(ancestor)
            ancestor = tasks[ancestor].parent
        if ancestor in roots:
            ours[pid] = task
    return ours
