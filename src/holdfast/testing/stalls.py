"""Measure stalls of processors, so that time limits of tests can exclude them.

A hypervisor may stop a virtual processor for a second. Then every call on it is late, and if its
thread holds the GIL, so are all other calls of the process. One process per processor detects this:
it sleeps most of the time and compares its wake-ups with the clock. A busy machine does not delay
it much, because the scheduler favours a process that sleeps, and neither does a GIL that another
process holds; only a stall does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from typing import Self

SAMPLE_S = 0.02
"""Interval of the clock samples."""

LATE_S = 0.2
"""Delay of a sample that counts as a stall."""

_ANSWER_S = 10.0
"""Timeout of a sample on request."""

_CLOCK = "CLOCK_MONOTONIC"  # the same for all processes
_WATCH = f"""
import os, select, sys, time
os.sched_setaffinity(0, {{int(sys.argv[1])}})
clock = time.{_CLOCK}
sampled = time.clock_gettime(clock)
while True:
    waiting, _, _ = select.select([0], [], [], {SAMPLE_S})
    now = time.clock_gettime(clock)
    if now - sampled > {SAMPLE_S + LATE_S}:
        print(sampled + {SAMPLE_S}, now, flush=True)
    sampled = now
    if waiting:
        if not os.read(0, 4096):
            break
        print(now, flush=True)
"""
"""The program of a watcher. It prints the begin and end of each stall, and the time of a sample for
each byte of input; it ends with its input."""


class StallWatch:
    """Watches every processor from a process on it, until `close`.

    All processes run when the constructor returns. Times are those of `time.monotonic`.
    """

    def __init__(self) -> None:
        self._reported = threading.Condition()
        self._spans: list[tuple[float, float]] = []
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", _WATCH, str(processor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            for processor in sorted(os.sched_getaffinity(0))
        ]
        self._sampled_s = {process.pid: 0.0 for process in self._processes}
        self._readers = [
            threading.Thread(target=self._read, args=(process,), name="stalls", daemon=True)
            for process in self._processes
        ]
        for reader in self._readers:
            reader.start()
        self._sample()

    def within(self, begun_s: float, ended_s: float) -> float:
        """Return the seconds between two times in which a processor was stalled.

        Each process takes another sample first, which ends a stall that lasts until now.
        """
        self._sample()
        with self._reported:
            spans = sorted(self._spans)
        stalled_s, counted_s = 0.0, begun_s
        for begin, end in spans:  # stalls of several processors may overlap
            stalled_s += max(0.0, min(ended_s, end) - max(counted_s, begin))
            counted_s = max(counted_s, end)
        return stalled_s

    def since(self, begun_s: float) -> float:
        """Return the seconds since a time, without stalls."""
        now_s = time.monotonic()
        return now_s - begun_s - self.within(begun_s, now_s)

    def __len__(self) -> int:
        """Return the number of stalls."""
        with self._reported:
            return len(self._spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]  # a pipe
        for reader in self._readers:
            reader.join()

    def _sample(self) -> None:
        """Let each process take a sample now; return when all have reported."""
        requested_s = time.monotonic()
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or been closed
                os.write(process.stdin.fileno(), b"?")  # type: ignore[union-attr]  # a pipe
        with self._reported:
            self._reported.wait_for(lambda: min(self._sampled_s.values()) >= requested_s, _ANSWER_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            return
        with process.stdout as lines:
            for line in lines:
                first_s, *end_s = map(float, line.split())
                with self._reported:
                    if end_s:
                        self._spans.append((first_s, end_s[0]))
                    else:
                        self._sampled_s[process.pid] = first_s
                        self._reported.notify_all()
