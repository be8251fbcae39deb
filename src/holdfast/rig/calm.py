"""Whether a machine is ours while we measure: what others have of its processors meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

DISTURBED = 0.05
"""The share of a machine that others may have while a sample is taken."""

T = TypeVar("T")

_KERNEL = "kthreadd"
"""Who started the kernel's own threads; in a container they are out of sight."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Task(NamedTuple):
    """A process: name, who started it, and seconds it and its ended children have computed."""

    name: str
    parent: int
    seconds: float


class Others:
    """Watches what everybody computes who is neither this process nor started by it.

    What the hypervisor gives to other machines counts, what the kernel does for us does not. No
    figure that is measured plays a part in it, so a sample may be left out for it.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cores = os.cpu_count() or 1
        self._at_s, self._others_s = time.monotonic(), self._read()

    def share(self) -> float:
        """Return the share of the machine that others had since this was asked before."""
        before_s, before = self._at_s, self._others_s
        self._at_s, self._others_s = time.monotonic(), self._read()
        passed_s = self._cores * (self._at_s - before_s)
        return max(0.0, self._others_s - before) / passed_s if passed_s > 0 else 0.0

    def _read(self) -> float:
        user, nice, system, _, _, _, _, stolen = (
            int(ticks) / _TICKS for ticks in (self._proc / "stat").read_text().split()[1:9]
        )
        ours_s = sum(task.seconds for task in _ours(self._tasks()).values())
        return user + nice + system + stolen - ours_s

    def _tasks(self) -> dict[int, Task]:
        tasks = {}
        for folder in self._proc.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                named, _, rest = (folder / "stat").read_text().rpartition(")")
            except OSError:
                continue  # it has ended meanwhile
            name, fields = named.partition("(")[2], rest.split()
            seconds = sum(map(int, fields[11:15])) / _TICKS
            tasks[int(folder.name)] = Task(name, int(fields[1]), seconds)
        return tasks


def calm(samples: Sequence[tuple[T, float]], least: int) -> list[T]:
    """Return the samples, given with others' share, that nobody disturbed, in their order.

    Where those are fewer than `least`, so many of the least disturbed.
    """
    shares = sorted(share for _, share in samples)[:least]
    limit = max(DISTURBED, *shares) if shares else DISTURBED
    return [sample for sample, share in samples if share <= limit]


def _ours(tasks: Mapping[int, Task]) -> dict[int, Task]:
    """Return this process, what it started, and the kernel's own."""
    mine = {number for number, task in tasks.items() if task.name == _KERNEL} | {os.getpid()}
    ours: dict[int, Task] = {}
    for number, task in tasks.items():
        line, at = set[int](), number
        while at in tasks and at not in mine and at not in line:
            line.add(at)
            at = tasks[at].parent
        if at in mine:
            ours[number] = task
    return ours
