"""Page locks of a whole arena that belongs to this process, so that no node asks for them back."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.buffers import Registrar, SharedMapping
from holdfast.limits import MIB

CHUNK_BYTES = 64 * MIB
"""Bytes that are locked by one call, as a node's chunks are."""


class ArenaLocks:
    """`LockedRanges` of an arena that is locked until `close`."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, registrar: Registrar, arena: SharedMapping) -> None:
        self._registrar = registrar
        self._locked: list[int] = []
        try:
            for at in range(0, arena.nbytes, CHUNK_BYTES):
                nbytes = min(CHUNK_BYTES, arena.nbytes - at)
                registrar.register(arena.address + at, nbytes)
                self._locked.append(arena.address + at)
        except BaseException:
            self.close()
            raise

    def use(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return True: all of the arena is locked."""
        del ranges
        return True

    def done(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: nothing is unlocked before `close`."""

    def want(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: no range is without a lock."""

    def close(self) -> None:
        """Unlock the arena; no copy may be in progress."""
        while self._locked:
            self._registrar.unregister(self._locked.pop())
