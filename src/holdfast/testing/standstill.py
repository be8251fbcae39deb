"""When this machine stood still, so that no call is blamed for it: a process that only looks.

A virtual machine can be taken off its processors for a second, and then every call under way is
late by that. A process that sleeps most of the time gets a processor soon after it wants one
however busy the others are, so only a standstill of the machine makes it late; what one process
does to itself, such as to hold its own lock, does not.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Self

LOOK_S = 0.02
LATE_S = 0.2
"""The clock must have gone so much further than it should have."""

_CLOCK = "CLOCK_MONOTONIC"  # one for all processes
_WATCH = f"""
import os, time
clock, parent = time.{_CLOCK}, os.getppid()
seen = time.clock_gettime(clock)
while os.getppid() == parent:
    time.sleep({LOOK_S})
    now = time.clock_gettime(clock)
    if now - seen > {LOOK_S + LATE_S}:
        print(seen + {LOOK_S}, now, flush=True)
    seen = now
"""


class Standstills:
    """Watches from a process of its own until `close`. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[float, float]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCH],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name="standstills", daemon=True)
        self._reader.start()

    def within(self, begun_s: float, ended_s: float) -> float:
        """Return for how many seconds between two times the machine stood still."""
        time.sleep(2 * LOOK_S)  # what has just ended is told with the next look
        with self._lock:
            spans = list(self._spans)
        return sum(max(0.0, min(ended_s, end) - max(begun_s, begin)) for begin, end in spans)

    def __len__(self) -> int:
        """Return how many there were."""
        with self._lock:
            return len(self._spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Look no longer."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        if self._process.stdout is None:
            return
        with self._process.stdout as told:
            for line in told:
                begin, end = map(float, line.split())
                with self._lock:
                    self._spans.append((begin, end))
