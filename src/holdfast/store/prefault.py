"""Fault the arenas' memory in ahead of use, and give back what clients touched without a slot.

Both run in one background thread. The kernel clears memory that is touched for the first time:
64 MiB keep a core busy for tens of milliseconds, and an engine that computes on every core waits
for it. So the thread fills the supply of ready memory only `_REST_S` after the last save or fetch:
a shorter pause is one of an engine that computes its answers. Until then it faults memory in only
if hardly any is ready.

A client maps its domain's whole arena and can touch pages that no slot covers. The thread looks
for such pages every `_LOOK_AGAIN_S` and gives them back, so that a node's memory exceeds its
capacity for about that long at most.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from holdfast.store.block_table import BlockTable
from holdfast.tiers.host import AHEAD_CHUNKS

_LOOK_AGAIN_S = 0.1

_REST_S = 1.0
"""Time without a save or fetch after which engines are taken to be idle."""

SCARCE_CHUNKS = 4
"""Free chunks with memory that there are to be whatever goes on: an engine on GPUs saves so much
between two looks at most."""

_WARN_AGAIN_S = 60.0
"""Least time between two log lines about memory that was reclaimed."""

_log = logging.getLogger("holdfast.store")


class ArenaPrefault:
    """A thread that faults in, and reclaims, the memory of every arena of a store.

    `reclaimed_bytes`: what was given back since start, after clients had touched it.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._seen = self._look()
        self._active_s = -math.inf
        self.reclaimed_bytes = 0
        self._warn_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-prefault", daemon=True)

    def start(self) -> None:
        """Start, with the memory that the first saves and fetches need."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current chunk."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            before, self._seen = self._seen, self._look()
            _, saving = self._seen
            active, now_s = saving or self._seen != before, time.monotonic()
            if active:
                self._active_s = now_s
            idle = not active and now_s - self._active_s >= _REST_S
            most = AHEAD_CHUNKS if idle else SCARCE_CHUNKS
            try:
                nbytes = sum(host.reclaim() for host in self._table.all_hosts())
            except OSError:
                _log.exception("memory behind free slots could not be given back; tried again")
                nbytes = 0
            self.reclaimed_bytes += nbytes
            if nbytes and time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + _WARN_AGAIN_S
                _log.warning(
                    "clients touched memory of the arena that no slot covers; given back bytes=%d "
                    "since_start=%d",
                    nbytes,
                    self.reclaimed_bytes,
                )
            try:
                brought = [host.prefault(most) for host in self._table.all_hosts()]
            except OSError:
                _log.exception("memory cannot be brought in; it comes page by page")
                brought = []
            pause_s = 0.0 if any(brought) else _LOOK_AGAIN_S

    def _look(self) -> tuple[int, bool]:
        """Return a number that every save and read changes, and whether a save is in progress."""
        return self._table.leases.issued, bool(self._table.leases.reservations)
