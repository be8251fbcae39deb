"""The counters of a shared tier: bytes read, bytes written, and failures."""

from __future__ import annotations

import threading

from holdfast.tiers.base import TierUsage


class TransferCounts:
    """Counters since start. Thread-safe; a reader may see a batch counted in part."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._written_bytes = 0
        self._failures = 0

    def add(self, *, read_bytes: int = 0, written_bytes: int = 0, failures: int = 0) -> None:
        """Add to the counters."""
        with self._lock:
            self._read_bytes += read_bytes
            self._written_bytes += written_bytes
            self._failures += failures

    def usage(self) -> TierUsage:
        """Return them as a usage without capacity: only the servers know theirs."""
        return TierUsage(0, 0, 0, self._read_bytes, self._written_bytes, self._failures)
