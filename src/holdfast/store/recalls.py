"""Recalls of page-locked memory: who wants it, how recalls end, and which peers get no more locks.

Memory that an engine has locked cannot move to another domain. So eviction asks for it and goes on
without it; once it is unlocked it is like all other memory. State only, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.tiers.chunk_locks import LockHolder
    from holdfast.tiers.host import HostTier

MISSES_MAX = 2
MISS_WINDOW_S = 3600.0
"""A peer that misses `MISSES_MAX` recalls within this time gets no more locks."""

WANTED_S = 60.0
"""Time for which memory is asked for ahead, after a domain needed memory that others had locked."""

_PEERS_MAX = 1_024


class Recalls:
    """Recalls of a store since its start. `outcomes`: by "returned", "missed" or "ended".

    "ended": the session ended for another reason before the engine returned the memory.
    """

    def __init__(self) -> None:
        self.outcomes = Counter[str]()
        self.holders: dict[LockHolder, bytes] = {}
        """The sessions that have asked for locks, and their domains."""
        self._misses: dict[Hashable, list[float]] = {}
        self._wanted: dict[HostTier, tuple[float, int]] = {}

    def missed(self, peer: Hashable, now_s: float) -> None:
        """Note that a peer did not return memory in time."""
        self.outcomes["missed"] += 1
        self._misses.setdefault(peer, []).append(now_s)
        if len(self._misses) > _PEERS_MAX:
            del self._misses[next(iter(self._misses))]

    def refuses(self, peer: Hashable) -> bool:
        """Return whether a peer gets no more locks until the node is started again."""
        times = self._misses.get(peer, [])
        after = times[MISSES_MAX - 1 :]
        return any(late - early <= MISS_WINDOW_S for early, late in zip(times, after, strict=False))

    def want(self, host: HostTier, chunks: int, now_s: float) -> None:
        """Note that a domain needs a run of chunks and meets memory that others have locked."""
        self._wanted[host] = now_s, chunks

    def wanted(self, now_s: float) -> dict[HostTier, int]:
        """Return the chunks of a run of each domain that wanted memory in the last minute."""
        self._wanted = {
            host: each for host, each in self._wanted.items() if now_s - each[0] <= WANTED_S
        }
        return {host: chunks for host, (_, chunks) in self._wanted.items()}
