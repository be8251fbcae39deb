"""Page locks of an arena's chunks: which engines have locked them, and which are asked back; pure.

An engine page-locks memory in its own process, and the kernel counts such a lock for that process
only. The node counts it here, and must not return a locked chunk to the kernel: the engine's GPU
would go on with the old pages, and the arena would have others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

REST_S = 5.0
"""Time for which a chunk that was asked back is not locked again, so that others can take it."""


class LockHolder(Protocol):
    """The session of an engine, as the owner of locks.

    `engine`: its name. `failure`: why it cannot lock memory; empty if it can.
    """

    engine: str
    failure: str

    def recall(self, chunks: Sequence[int]) -> None:
        """Ask for chunks back. Runs under the host tier's lock: returns at once, never raises."""


class ChunkLocks:
    """The holders of each locked chunk. `recalled`: locked chunks that are asked back."""

    def __init__(self) -> None:
        self.recalled: set[int] = set()
        self._holders: dict[int, set[LockHolder]] = {}
        self._resting: dict[int, float] = {}

    def __len__(self) -> int:
        """Return the number of locked chunks."""
        return len(self._holders)

    def is_locked(self, chunk: int) -> bool:
        """Return whether any engine has locked a chunk, or may lock it at any moment."""
        return chunk in self._holders

    def is_locked_by(self, chunk: int, holder: LockHolder) -> bool:
        """Return whether a holder has a lock of a chunk."""
        return holder in self._holders.get(chunk, ())

    def any_locked(self, chunks: range) -> bool:
        """Return whether any of these chunks is locked."""
        return bool(self._holders) and not self._holders.keys().isdisjoint(chunks)

    def any_recalled(self, chunks: range) -> bool:
        """Return whether any of these chunks is asked back."""
        return bool(self.recalled) and not self.recalled.isdisjoint(chunks)

    def may_lock(self, chunks: range, now_s: float) -> bool:
        """Return whether chunks of a run may be locked: none is asked back, or was lately."""
        if self._resting and any(self._resting.get(each, now_s) > now_s for each in chunks):
            return False
        return not self.any_recalled(chunks)

    def add(self, chunk: int, holder: LockHolder) -> None:
        """Count a holder's lock of a chunk; a holder has one lock of a chunk at most."""
        self._holders.setdefault(chunk, set()).add(holder)

    def remove(self, chunk: int, holder: LockHolder, now_s: float) -> bool:
        """End a holder's lock; return whether it was the chunk's last one."""
        holders = self._holders.get(chunk)
        if holders is None or holder not in holders:
            return False
        holders.remove(holder)
        if holders:
            return False
        del self._holders[chunk]
        if chunk in self.recalled:
            self.recalled.remove(chunk)
            self._resting[chunk] = now_s + REST_S
        return True

    def holders(self) -> dict[LockHolder, int]:
        """Return the number of chunks that each holder has locked."""
        return Counter(holder for holders in self._holders.values() for holder in holders)

    def held_by(self, holder: LockHolder) -> list[int]:
        """Return the chunks that a holder has locked, in order."""
        return sorted(chunk for chunk, holders in self._holders.items() if holder in holders)

    def recall(self, chunks: Iterable[int]) -> list[int]:
        """Ask all holders of chunks for them; return the chunks, without those asked for before."""
        asked = [each for each in chunks if each in self._holders and each not in self.recalled]
        self.recalled.update(asked)
        by_holder: dict[LockHolder, list[int]] = {}
        for chunk in asked:
            for holder in self._holders[chunk]:
                by_holder.setdefault(holder, []).append(chunk)
        for holder, wanted in by_holder.items():
            holder.recall(wanted)
        return asked
