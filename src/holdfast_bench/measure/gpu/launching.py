"""Launch small kernels one after another, and note how long each launch took.

Run as a program, it is the second process of the phase `locking`: it prints `ready`, and after its
input has ended the launches that took long, as JSON.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast_bench.measure.gpu.accelerator import HostAccelerator, accelerator

LONG_S = 0.0005
"""Launches that took at least as long are noted."""

NOTED_MAX = 10_000
BETWEEN_WAITS = 64
"""Launches between two waits for the GPU, so that its queue is never full."""

REST_S = 0.0001
"""Rest after a launch: a thread without rest takes the interpreter from all others."""


class LongLaunch(NamedTuple):
    """A launch: when it began, on the clock of all processes, and how long it took."""

    at_s: float
    seconds: float


class LaunchLoop:
    """Launches on a thread of its own from `start` to `stop`."""

    def __init__(self, gpu: HostAccelerator) -> None:
        self._gpu = gpu
        self._flag = gpu.bytes(256)
        self._stop = threading.Event()
        self._found: list[LongLaunch] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._flag.add_(1)
        gpu.synchronise()

    def start(self) -> None:
        """Begin to launch."""
        self._thread.start()

    def stop(self) -> list[LongLaunch]:
        """End; return the launches that took long."""
        self._stop.set()
        self._thread.join()
        return self._found

    def _run(self) -> None:
        launches = 0
        while not self._stop.wait(REST_S):
            begun_s = time.monotonic()
            self._flag.add_(1)
            took_s = time.monotonic() - begun_s
            if took_s >= LONG_S and len(self._found) < NOTED_MAX:
                self._found.append(LongLaunch(begun_s, took_s))
            launches += 1
            if not launches % BETWEEN_WAITS:
                self._gpu.wait_for_stream()


def longest_ms(launches: Sequence[LongLaunch], begun_s: float, ended_s: float) -> float:
    """Return the longest of the launches that were in progress between two times, 0 without one."""
    inside = [
        each.seconds
        for each in launches
        if each.at_s < ended_s and each.at_s + each.seconds > begun_s
    ]
    return 1e3 * max(inside, default=0.0)


def main(argv: Sequence[str]) -> int:
    """Launch until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true")
    loop = LaunchLoop(accelerator(rehearse=parser.parse_args(argv).rehearse))
    loop.start()
    print("ready", flush=True)
    sys.stdin.read()
    print(msgspec.json.encode(loop.stop()).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
