"""Fault in the arenas' memory before it is used, and return memory that no slot covers.

Both run in one background thread. The kernel clears memory that is touched for the first time:
64 MiB keep a core busy for tens of milliseconds, and an engine that computes on every core waits
for it. In a shorter pause than `_REST_S` between saves and fetches, an engine computes an answer.
So the thread faults in `AHEAD_CHUNKS` only after `_REST_S`, and before that only `SCARCE_CHUNKS`.

A client maps its domain's whole arena and can touch pages that no slot covers. The thread looks
for such pages every `_LOOK_AGAIN_S` and returns them to the kernel, so that a node's memory exceeds
its capacity for about that long at most.

If engines have page-locked memory, the thread also asks for it ahead of its use by other domains,
and overwrites what an erased domain left in memory that stays locked.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from holdfast.store import evict
from holdfast.store.block_table import BlockTable
from holdfast.tiers.chunks import AHEAD_CHUNKS

_LOOK_AGAIN_S = 0.1

_REST_S = 1.0
"""Time without a save or fetch after which engines are taken to be idle."""

SCARCE_CHUNKS = 4
"""Minimum of free chunks with memory, also while engines are active: an engine on GPUs saves at
most this much between two looks."""

_WARN_AGAIN_S = 60.0
"""Minimum time between two log lines about reclaimed memory."""

_log = logging.getLogger("holdfast.store")


class ArenaPrefault:
    """A thread that faults in, and reclaims, the memory of every arena of a store.

    `reclaimed_bytes`: bytes that clients had touched without a slot and that were returned, since
    start.
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
                _log.exception("memory of free slots could not be returned; tried again")
                nbytes = 0
            self.reclaimed_bytes += nbytes
            if nbytes and time.monotonic() >= self._warn_at:
                self._warn_at = time.monotonic() + _WARN_AGAIN_S
                _log.warning(
                    "clients touched memory of the arena that no slot covers; returned bytes=%d "
                    "since_start=%d",
                    nbytes,
                    self.reclaimed_bytes,
                )
            if locked := [host for host in self._table.all_hosts() if host.has_locks]:
                evict.recall_ahead(self._table)
                for host in locked:
                    host.clear_erased()
            try:
                faulted_in = [host.prefault(most) for host in self._table.all_hosts()]
            except OSError:
                _log.exception("memory cannot be faulted in ahead of its use")
                faulted_in = []
            pause_s = 0.0 if any(faulted_in) else _LOOK_AGAIN_S

    def _look(self) -> tuple[int, bool]:
        """Return a number that every save and read changes, and whether a save is in progress."""
        return self._table.leases.issued, bool(self._table.leases.reservations)
