"""The page-locked memory of an engine, over reconnections: one `LockedMemory` per connection."""

from __future__ import annotations

from holdfast.buffers import Registrar
from holdfast.client.connection import StoreClient
from holdfast.wire.local.client import Client
from holdfast.wire.local.locked_memory import LockedMemory


class EngineLocks:
    """Locks the arena of the node that an engine is connected to, for its device.

    `registrar`: that of the device; None if it needs no locks: then nothing is done. `by_default`
    False: nothing is done either unless the node's operator has given a size of memory to lock. One
    thread calls the methods, any thread `present`.
    """

    def __init__(self, registrar: Registrar | None, *, by_default: bool = True) -> None:
        self._registrar = registrar
        self._by_default = by_default
        self._present: tuple[Client, LockedMemory] | None = None

    def of(self, client: StoreClient) -> LockedMemory | None:
        """Return the locked memory of a client's arena; None if there is nothing to lock."""
        if self._registrar is None or client.arena is None:
            return None
        if not isinstance(client, Client):  # an embedded store grants no locks
            return None
        if not (self._by_default or client.welcome.lock_requested):
            return None
        if self._present is None or self._present[0] is not client:
            if self._present is not None:
                self._present[1].start()  # it ends by itself, once no copy uses it
            self._present = client, LockedMemory(client, self._registrar)
        return self._present[1]

    def present(self, client: StoreClient) -> LockedMemory | None:
        """Return the locked memory of a client if the engine's steps use it, else None."""
        present = self._present
        return present[1] if present is not None and present[0] is client else None

    def close(self) -> None:
        """Unlock all memory, when the copies that use it have ended."""
        if self._present is not None:
            self._present[1].close()
            self._present = None
