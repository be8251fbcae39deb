"""How to measure in pairs: ours and the limit in turns, medians, with or without a busy thread."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.rig.limits import GB
from holdfast.rig.report import Row, share, with_more


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


def paired(
    rounds: int, ours: Callable[[], Speed], limit: Callable[[], float]
) -> tuple[Speed, float]:
    """Take turns; return the medians of ours and of the limit."""
    speeds, limits = [], []
    for _ in range(rounds):
        limits.append(limit())
        speeds.append(ours())
    median = Speed(
        statistics.median(speed.gb_per_s for speed in speeds),
        statistics.median(speed.cpu_s_per_gb for speed in speeds),
    )
    return median, statistics.median(limits)


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


def speed_row(what: str, speed: Speed, limit: float, goal: float | None, **more: object) -> Row:
    """Make the row of a speed beside its limit."""
    row = share(what, speed.gb_per_s, "GB/s", limit, goal)
    return with_more(row, {"cpu_s_per_gb": speed.cpu_s_per_gb, **more})
