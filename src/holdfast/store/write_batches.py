"""How large batches of writes and sealed groups are, and how long a small batch waits for more."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from holdfast.clock import Clock
from holdfast.limits import MIB
from holdfast.tiers.base import PrefersBatches, Tier
from holdfast.tiers.host import HostTier

Item = TypeVar("Item")

BATCH_BLOCKS = 32
"""Maximum number of blocks in one batch, unless the tier prefers larger ones."""

LARGE_BATCH_BLOCKS = 4_096
"""Maximum number of blocks in one batch of a tier that prefers batches of a size."""

STAGED_BYTES = 32 * MIB
"""Raw bytes of the blocks of a batch that are read from other lower tiers."""

_HOST_SHARE = 1 / 8
"""Part of memory that a preferred batch may take: its blocks stay there until they are written."""


class ParallelSeal(NamedTuple):
    """Limits for sealing a batch in groups: `groups` threads, of which `sealed_at_once` seal.

    The other threads write. The group size gives each thread two groups, within the bounds.
    """

    groups: int
    sealed_at_once: int
    group_bytes_min: int
    group_bytes_max: int

    def group_bytes(self, batch_bytes: int) -> int:
        """Return the minimum size of a group, for a batch of this size."""
        halves = batch_bytes // (2 * self.groups)
        return min(max(halves, self.group_bytes_min), self.group_bytes_max)


LOCAL_SEAL = ParallelSeal(8, max(1, len(os.sched_getaffinity(0)) // 2), MIB, 4 * MIB)
"""Limits for local tiers: small groups, so that writing starts early and overlaps sealing."""

SHARED_SEAL = ParallelSeal(2, 2, 16 * MIB, 16 * MIB)
"""Limits for shared tiers: large groups, because every message costs a round trip."""


class BatchLimits(NamedTuple):
    """Limits of one batch: blocks, raw bytes, and raw bytes read from other lower tiers.

    `preferred_bytes`: raw bytes that the tier writes best at once; 0 if it has no preference. Up to
    `wait_s` seconds, a smaller batch waits for more blocks.
    """

    blocks: int = BATCH_BLOCKS
    nbytes: float = math.inf
    staged_bytes: int = STAGED_BYTES
    preferred_bytes: int = 0
    wait_s: float = 0.0


def batch_limits(tier: Tier, hosts: Sequence[HostTier]) -> BatchLimits:
    """Return the limits of a tier's batches; a batch has two parts of the preferred size.

    `hosts`: the host tiers of the store, which share one memory.
    """
    if not isinstance(tier, PrefersBatches) or not tier.batch_bytes:
        return BatchLimits()
    memory_bytes = max((host.usage().capacity_bytes for host in hosts), default=0)
    preferred = max(MIB, int(min(tier.batch_bytes, _HOST_SHARE * memory_bytes)))
    return BatchLimits(
        LARGE_BATCH_BLOCKS,
        2 * preferred,
        max(preferred, STAGED_BYTES),
        preferred,
        tier.batch_wait_s,
    )


class BatchWait:
    """The wait of one writer for a batch of the preferred size. Used by its thread only."""

    def __init__(self, limits: BatchLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._since_s: float | None = None

    def goes_on(self, waiting_bytes: int) -> bool:
        """Return whether to wait on, with this number of raw bytes queued."""
        limits, now_s = self._limits, self._clock.now()
        if not limits.wait_s or not 0 < waiting_bytes < limits.preferred_bytes:
            return False
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < limits.wait_s

    def end(self) -> None:
        """Begin a new wait with the next block: what was queued is being written."""
        self._since_s = None


def groups_of(
    items: Sequence[Item], group_bytes: int, size: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Split items into groups; a group ends when it has at least `group_bytes`."""
    group = list[Item]()
    nbytes = 0
    for item in items:
        group.append(item)
        nbytes += size(item)
        if nbytes >= group_bytes:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
