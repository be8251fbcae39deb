"""The key ring file that several nodes share: applies to a store what other nodes did to it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.keys.keyring import KeyRing
from holdfast.limits import RING_STALE_S
from holdfast.store.core import StoreParts
from holdfast.store.domains import forget_erased, leave_memory, log_unreadable
from holdfast.store.unreadable import sweep_retired

_log = logging.getLogger("holdfast.store")


class SharedRing:
    """Follows the key ring of one store; calls `on_back` when a lost ring can be read again.

    A ring that could not be read for `RING_STALE_S`, or whose reading hangs so long, may have lost
    keys. Its domains are not served, and leave memory, until it can be read again.
    """

    def __init__(self, store: StoreParts, on_back: Callable[[], None]) -> None:
        self.lost = False
        """Whether its domains are not served."""
        self._store = store
        self._on_back = on_back

    def follow(self) -> None:
        """Read the ring's file and apply its changes."""
        sealing = self._store.table.sealing
        ring, watch = sealing.ring, sealing.watch
        if ring.path is None:
            return
        watch.look_briefly()
        stale = self._store.clock.now() - watch.read_at >= RING_STALE_S
        if stale and not self.lost:
            self._suspend(ring, watch.why or "it was not read in time, the file system may hang")
        elif self.lost and not stale and not ring.suspended:
            self._store.audit.record("ring", state="back")
            self.lost = False
            self._on_back()
        pending = ring.erasures.pending() or ring.retirements.pending()
        if pending and self._store.erasing.acquire(blocking=False):  # else another thread does it
            try:
                self._apply(ring)
            finally:
                self._store.erasing.release()

    def _suspend(self, ring: KeyRing, why: str) -> None:
        """Serve the ring's domains no longer, and remove their blocks from memory."""
        ring.suspend()
        _log.error(
            "keyring %s: %s; its domains are not served until it can be read", ring.path, why
        )
        self.lost = True
        self._store.audit.record("ring", state="lost", why=why)
        for domain in self._store.domain_ids.values():
            if self._store.table.sealing.seals(domain):
                leave_memory(self._store, domain)

    def _apply(self, ring: KeyRing) -> None:
        """Forget the blocks of domains that other nodes erased, or whose keys they retired."""
        store = self._store
        for domain in ring.erasures.pending():
            blocks = forget_erased(store, ring, domain).blocks
            store.audit.record("erased elsewhere", domain=ring.name(domain), blocks=blocks)
        for domain in ring.retirements.pending():
            if ring.is_away(domain):
                continue
            found = sweep_retired(store, ring, domain).as_data()
            if found["blocks"]:
                name = ring.name(domain)
                log_unreadable(f"domain {name!r}: another node retired data keys", found)
                store.audit.record("retired elsewhere", domain=name, blocks=found["blocks"])
