"""What a store knows of its shared tiers: cached lookups, lookups in flight, copies that failed.

Cached lookups are blocks that, as far as this node knows, only shared tiers hold. They come from
lookups, and from blocks that this node wrote to a shared tier and then evicted. Shared tiers do not
announce evictions, so an entry may be stale. The cache is bounded; a lookup of a forgotten block
asks the tier again. State only: call under the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome

MAX_CACHED_LOOKUPS = 1 << 18
"""Maximum number of cached remote lookups; the oldest entries are dropped first."""

NO_S = 0.25
"""How long a miss stays valid, in seconds."""

NOES_MAX = 4_096

Name: TypeAlias = tuple[int, Namespace, bytes]
"""Tier number, and namespace and key of the first block looked up."""

FAILED_MAX = 65_536
FAILED_S = 60.0
"""Time for which a shared tier is not asked for a block that failed, in seconds."""


class RemoteLookups:
    """The rows of cached remote lookups, oldest first."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, row: int) -> None:
        """Add a row, or make it the youngest."""
        self._rows[row] = None
        self._rows.move_to_end(row)

    def forget(self, row: int) -> None:
        """Remove a row, if it is there."""
        self._rows.pop(row, None)

    def pop_excess(self, most: int) -> list[int]:
        """Remove up to `most` of the oldest entries beyond the bound; return their rows."""
        excess = min(most, len(self._rows) - MAX_CACHED_LOOKUPS)
        return [self._rows.popitem(last=False)[0] for _ in range(excess)]


class InflightLookups:
    """Lookups in flight, and recent misses: equal lookups share one question to a tier.

    Without it, a thousand requests that begin with one new segment would ask its target a thousand
    times, just when it is busiest.
    """

    def __init__(self) -> None:
        self._under_way: dict[Name, Future[Outcome]] = {}
        self._noes: OrderedDict[Name, tuple[float, Outcome]] = OrderedDict()

    def begin(self, name: Name, now_s: float) -> Future[Outcome] | None:
        """Return None if the caller must ask the tier and call `end`, else the outcome to wait for.

        The outcome is OK if the tier answers, whether it holds the block or not. It is there
        already if the tier missed, or did not answer, within `NO_S`.
        """
        under_way = self._under_way.get(name)
        if under_way is not None:
            return under_way
        no_s, outcome = self._noes.get(name, (-NO_S, Outcome.OK))
        if now_s - no_s < NO_S:
            told: Future[Outcome] = Future()
            told.set_result(outcome)
            return told
        self._under_way[name] = Future()
        return None

    def end(self, name: Name, found: int, now_s: float, outcome: Outcome = Outcome.OK) -> None:
        """Finish a lookup and wake the waiting callers; `found` is the number of blocks held."""
        self._under_way.pop(name).set_result(outcome)
        self._noes.pop(name, None)
        if not found:
            self._noes[name] = now_s, outcome
            if len(self._noes) > NOES_MAX:
                self._noes.popitem(last=False)


class FailedRemote:
    """Blocks whose copy on a shared tier failed here, with outcome; at most `FAILED_MAX`.

    They are not requested for a while. A shared tier keeps such a copy if other hosts can read it,
    and would answer that it holds the block.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, Namespace, bytes], tuple[float, Outcome]] = (
            OrderedDict()
        )

    def add(
        self, tier: int, namespace: Namespace, key: bytes, outcome: Outcome, now_s: float
    ) -> None:
        """Record a block that was CORRUPT or UNREADABLE."""
        self._blocks.pop((tier, namespace, key), None)
        self._blocks[tier, namespace, key] = now_s + FAILED_S, outcome
        if len(self._blocks) > FAILED_MAX:
            self._blocks.popitem(last=False)

    def why(self, tier: int, namespace: Namespace, key: bytes, now_s: float) -> Outcome:
        """Return the outcome recorded for a block; OK if there is none, or if it is too old."""
        if not self._blocks:
            return Outcome.OK
        until_s, outcome = self._blocks.get((tier, namespace, key), (now_s, Outcome.OK))
        return outcome if now_s < until_s else Outcome.OK

    def readable(self, tier: int, namespace: Namespace, keys: Sequence[bytes], now_s: float) -> int:
        """Return how many leading blocks may be requested."""
        if not self._blocks:
            return len(keys)
        for number, key in enumerate(keys):
            if self.why(tier, namespace, key, now_s) is not Outcome.OK:
                return number
        return len(keys)

    def written(self, tier: int, namespace: Namespace, key: bytes) -> None:
        """Forget a block of which a good copy was written."""
        if self._blocks:
            self._blocks.pop((tier, namespace, key), None)
