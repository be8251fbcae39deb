"""When a processor stood still, so that no call is blamed for it: processes that only look.

A virtual machine can be taken off a processor for a second, and then every call whose thread ran
there is late by that, and so is every other of its process if that thread held the lock of the
interpreter. A process that sleeps most of the time gets its processor soon after it wants it
however busy the others are, so only a standstill makes it late; what one process does to itself,
such as to hold its own lock, does not. One looks at each processor: others may well go on.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from typing import Self

LOOK_S = 0.02
LATE_S = 0.2
"""The clock must have gone so much further than it should have."""

_ANSWER_S = 10.0
"""So long a look that was asked for is waited for."""

_CLOCK = "CLOCK_MONOTONIC"  # one for all processes
_WATCH = f"""
import os, select, sys, time
os.sched_setaffinity(0, {{int(sys.argv[1])}})
clock = time.{_CLOCK}
seen = time.clock_gettime(clock)
while True:
    waiting, _, _ = select.select([0], [], [], {LOOK_S})
    now = time.clock_gettime(clock)
    if now - seen > {LOOK_S + LATE_S}:
        print(seen + {LOOK_S}, now, flush=True)
    seen = now
    if waiting:
        if not os.read(0, 4096):
            break
        print(now, flush=True)
"""
"""It ends with its input, and answers what comes there with when it looked."""


class Standstills:
    """Watches from a process on each processor until `close`. Times are `time.monotonic`'s.

    Once it is made, all of them look.
    """

    def __init__(self) -> None:
        self._told = threading.Condition()
        self._spans: list[tuple[float, float]] = []
        self._processes = [_look_at(processor) for processor in sorted(os.sched_getaffinity(0))]
        self._looked_s = {process.pid: 0.0 for process in self._processes}
        self._readers = [
            threading.Thread(target=self._read, args=(process,), name="standstills", daemon=True)
            for process in self._processes
        ]
        for reader in self._readers:
            reader.start()
        self._look()

    def within(self, begun_s: float, ended_s: float) -> float:
        """Return for how many seconds between two times a processor stood still.

        Each process is asked to look once more: one that stood still until now tells it first.
        """
        self._look()
        with self._told:
            spans = sorted(self._spans)
        stood_s, counted_s = 0.0, begun_s
        for begin, end in spans:  # of several processors they may overlap
            stood_s += max(0.0, min(ended_s, end) - max(counted_s, begin))
            counted_s = max(counted_s, end)
        return stood_s

    def since(self, begun_s: float) -> float:
        """Return the seconds since a time, less those for which a processor stood still."""
        now_s = time.monotonic()
        return now_s - begun_s - self.within(begun_s, now_s)

    def __len__(self) -> int:
        """Return how many there were."""
        with self._told:
            return len(self._spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Look no longer."""
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()  # type: ignore[union-attr]  # a pipe
        for reader in self._readers:
            reader.join()

    def _look(self) -> None:
        """Have each process look now; return when all have told what they saw."""
        asked_s = time.monotonic()
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or been closed
                os.write(process.stdin.fileno(), b"?")  # type: ignore[union-attr]  # a pipe
        with self._told:
            self._told.wait_for(lambda: min(self._looked_s.values()) >= asked_s, _ANSWER_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            return
        with process.stdout as told:
            for line in told:
                first_s, *end_s = map(float, line.split())
                with self._told:
                    if end_s:
                        self._spans.append((first_s, end_s[0]))
                    else:
                        self._looked_s[process.pid] = first_s
                        self._told.notify_all()


def _look_at(processor: int) -> subprocess.Popen[str]:
    """Return a process that runs on that processor alone and prints when it was late."""
    return subprocess.Popen(
        [sys.executable, "-c", _WATCH, str(processor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
