"""Warnings about refused peers: one for each peer and reason, and the number of its repeats.

A refused engine asks again until someone changes a configuration. A line for each attempt hides
everything else in the log.
"""

from __future__ import annotations

import logging
import threading
import time

from holdfast.keys.denials import DenialCounts


class RefusalLog:
    """Writes warnings to `log`. Thread-safe."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._counts = DenialCounts()

    def report(self, who: str, why: str, line: str) -> None:
        """Write `line`, unless one about the same party and reason was written: then count it.

        `who` is a kind and a name: "user 1000". The numbers of repeats are written with a later
        warning, at intervals that grow from a minute to an hour.
        """
        now_s = time.monotonic()
        with self._lock:
            new = self._counts.note(who, why, now_s)
            late = self._counts.due(now_s)
        if new:
            self._log.warning("%s", line)
        for one in late:
            self._log.warning("%d more times: %s: %s", one.repeats, one.who, one.why)
