"""How to measure in pairs: ours and the limit by turns, medians, with or without a busy thread."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.rig.limits import GB
from holdfast.rig.report import Row


class Speed(NamedTuple):
    """One pass: speed, and processor seconds of this process for each gigabyte."""

    gb_per_s: float
    cpu_s_per_gb: float


def timed(nbytes: int, work: Callable[[], object]) -> Speed:
    """Run once; return how fast `nbytes` went by."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    work()
    seconds, spent_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return Speed(nbytes / seconds / GB, spent_s / nbytes * GB)


class Pairs(NamedTuple):
    """What came of taking turns: the medians of ours, of the limit, and of ours over it.

    The ratio is taken within each round: what moves both, as a neighbour of a shared disk does
    within minutes, is not in it.
    """

    ours: Speed
    limit_gb_per_s: float
    ratio: float


def paired(rounds: int, ours: Callable[[], Speed], limit: Callable[[], float]) -> Pairs:
    """Take turns, each going first in every other round."""
    speeds, limits = [], []
    for number in range(rounds):
        if number % 2:
            speeds.append(ours())
        limits.append(limit())
        if not number % 2:
            speeds.append(ours())
    ratios = (speed.gb_per_s / other for speed, other in zip(speeds, limits, strict=True))
    return Pairs(middle(speeds), statistics.median(limits), statistics.median(ratios))


def middle(speeds: Sequence[Speed]) -> Speed:
    """Return the medians of several passes."""
    return Speed(
        statistics.median(speed.gb_per_s for speed in speeds),
        statistics.median(speed.cpu_s_per_gb for speed in speeds),
    )


@contextmanager
def busy_thread() -> Iterator[None]:
    """Let one thread of this process spin in Python meanwhile, as an engine's scheduler does."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            count += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def speed_row(what: str, pairs: Pairs, goal: float | None, **more: object) -> Row:
    """Make the row of a speed beside its limit."""
    speed, limit, ratio = pairs
    return Row(
        what=what,
        value=speed.gb_per_s,
        unit="GB/s",
        limit=limit,
        ratio=ratio,
        goal=goal,
        ok=None if goal is None else ratio >= goal,
        more={"cpu_s_per_gb": speed.cpu_s_per_gb, **more},
    )
