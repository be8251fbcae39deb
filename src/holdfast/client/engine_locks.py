"""The page-locked memory of an engine, over reconnections: one `LockedMemory` per connection."""

from __future__ import annotations

from holdfast.buffers import Registrar
from holdfast.wire.local.client import Client
from holdfast.wire.local.locked_memory import LockedMemory


class EngineLocks:
    """Locks the arena of the node that an engine is connected to, for its device.

    `registrar`: that of the device; None if it needs no locks: then nothing is done. One thread
    calls the methods.
    """

    def __init__(self, registrar: Registrar | None) -> None:
        self._registrar = registrar
        self._client: Client | None = None
        self._memory: LockedMemory | None = None

    def of(self, client: Client) -> LockedMemory | None:
        """Return the locked memory of a client's arena; None if there is nothing to lock."""
        if self._registrar is None or client.arena is None:
            return None
        if client is not self._client:
            # That of a lost connection ends by itself, once no copy uses it.
            self._client, self._memory = client, LockedMemory(client, self._registrar)
        return self._memory

    def close(self) -> None:
        """Unlock all memory, when the copies that use it have ended."""
        if self._memory is not None:
            self._memory.close()
            self._client = self._memory = None
