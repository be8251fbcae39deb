"""Paired runs: our code and the hardware limit in alternation, and the medians of both."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from holdfast.report import Row
from holdfast_bench.harness.hardware_limits import GB


class Speed(NamedTuple):
    """One pass: throughput, and CPU seconds of this process per gigabyte."""

    gb_per_s: float
    cpu_s_per_gb: float


def timed(nbytes: int, work: Callable[[], object]) -> Speed:
    """Run `work` once, which transfers `nbytes`; return its speed."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    work()
    seconds, spent_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return Speed(nbytes / seconds / GB, spent_s / nbytes * GB)


class PairedSpeeds(NamedTuple):
    """Medians of our speed, of the limit, and of the ratio of both.

    The ratio is computed per round, so that drift that affects both sides, such as other load on a
    shared disk, cancels out.
    """

    ours: Speed
    limit_gb_per_s: float
    ratio: float


def paired(rounds: int, ours: Callable[[], Speed], limit: Callable[[], float]) -> PairedSpeeds:
    """Measure both sides in every round; the order alternates from round to round."""
    speeds, limits = [], []
    for number in range(rounds):
        if number % 2:
            speeds.append(ours())
        limits.append(limit())
        if not number % 2:
            speeds.append(ours())
    ratios = (speed.gb_per_s / other for speed, other in zip(speeds, limits, strict=True))
    return PairedSpeeds(median_speed(speeds), statistics.median(limits), statistics.median(ratios))


def median_speed(speeds: Sequence[Speed]) -> Speed:
    """Return the medians of several passes: of the throughput, and of the CPU seconds."""
    return Speed(
        statistics.median(speed.gb_per_s for speed in speeds),
        statistics.median(speed.cpu_s_per_gb for speed in speeds),
    )


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run a thread that holds the interpreter, as an engine's scheduler does."""
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


def speed_row(what: str, pairs: PairedSpeeds, goal: float | None, **more: object) -> Row:
    """Return the row of a speed and its limit; it is ok if the ratio is at least `goal`."""
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
