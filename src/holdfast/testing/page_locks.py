"""Locked memory of an arena for tests of devices: chunks are locked and recalled on command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.buffers import Registrar, SharedMapping


class TestLocks:
    """Locks of one arena in chunks, as `holdfast.devices.base.LockedRanges` promises them.

    `uses` counts the users of each chunk; `wanted` has the ranges that were asked for.
    """

    __test__ = False  # not a test, whatever its name begins with

    def __init__(self, registrar: Registrar, arena: SharedMapping, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.uses: Counter[int] = Counter()
        self.wanted: list[tuple[int, int]] = []
        self.locked: set[int] = set()
        self.recalled: set[int] = set()
        self._registrar = registrar
        self._start = arena.address

    def use(self, ranges: Sequence[tuple[int, int]]) -> bool:
        chunks = self._chunks(ranges)
        if not chunks <= self.locked - self.recalled:
            return False
        self.uses.update(chunks)
        return True

    def done(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.uses.subtract(self._chunks(ranges))
        self.uses += Counter()  # without the zeros
        for chunk in self.recalled - self.uses.keys():
            self._unlock(chunk)

    def want(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.wanted += ranges

    def lock(self, chunk: int) -> None:
        """Lock a chunk, unless it is locked."""
        if chunk not in self.locked:
            self._registrar.register(self._start + chunk * self.chunk_bytes, self.chunk_bytes)
            self.locked.add(chunk)

    def recall(self, chunk: int) -> None:
        """Unlock a chunk as soon as nothing uses it; new users are refused at once."""
        if chunk in self.locked:
            self.recalled.add(chunk)
            if chunk not in self.uses:
                self._unlock(chunk)

    def _unlock(self, chunk: int) -> None:
        self._registrar.unregister(self._start + chunk * self.chunk_bytes)
        self.locked.discard(chunk)
        self.recalled.discard(chunk)

    def _chunks(self, ranges: Sequence[tuple[int, int]]) -> set[int]:
        return {
            chunk
            for start, nbytes in ranges
            for chunk in range(start // self.chunk_bytes, -(-(start + nbytes) // self.chunk_bytes))
        }
