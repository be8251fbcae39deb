"""What a store knows of its shared tiers: cached lookups, lookups in flight, copies that failed.

Cached lookups are blocks that, as far as this node knows, only shared tiers hold. They come from
lookups, and from blocks that this node wrote to a shared tier and then evicted. Shared tiers do not
announce evictions, so an entry may be stale. The cache is bounded; a lookup of a forgotten block
asks the tier again. State only: call under the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from typing import TypeAlias

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome

MAX_CACHED_LOOKUPS = 1 << 18
"""Maximum number of cached remote lookups; the oldest entries are dropped first."""

MISS_S = 0.25
"""How long a miss stays valid, in seconds."""

MISSES_MAX = 4_096

Name: TypeAlias = tuple[int, Namespace, bytes]
"""Tier number, and namespace and key of a block: the first one of those looked up."""

FAILED_MAX = 65_536
FAILED_S = 60.0
"""Time for which a shared tier is not asked for a block whose copy there failed, in seconds.

It keeps such a copy if other hosts can read it, and would answer that it holds the block.
"""


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


class RecentOutcomes:
    """Outcomes by name, valid for `valid_s` seconds; at most `most`, the oldest leave first."""

    def __init__(self, valid_s: float, most: int) -> None:
        self._valid_s = valid_s
        self._most = most
        self._outcomes: OrderedDict[Name, tuple[float, Outcome]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outcomes)

    def note(self, name: Name, outcome: Outcome, now_s: float) -> None:
        """Record an outcome instead of an earlier one."""
        self._outcomes.pop(name, None)
        self._outcomes[name] = now_s + self._valid_s, outcome
        if len(self._outcomes) > self._most:
            self._outcomes.popitem(last=False)

    def get(self, name: Name, now_s: float) -> Outcome | None:
        """Return the outcome recorded; None if there is none, or if it is too old."""
        until_s, outcome = self._outcomes.get(name, (now_s, None))
        return outcome if now_s < until_s else None

    def forget(self, name: Name) -> None:
        """Remove an outcome, if there is one."""
        self._outcomes.pop(name, None)


class InflightLookups:
    """Lookups in flight, and recent misses: equal lookups share one question to a tier.

    Without it, a thousand requests that begin with one new segment would ask its target a thousand
    times, just when it is busiest.
    """

    def __init__(self) -> None:
        self._under_way: dict[Name, Future[Outcome]] = {}
        self._misses = RecentOutcomes(MISS_S, MISSES_MAX)

    def begin(self, name: Name, now_s: float) -> Future[Outcome] | None:
        """Return None if the caller must ask the tier and call `end`, else the outcome to wait for.

        The outcome is OK if the tier answers, whether it holds the block or not. It is there
        already if the tier missed, or did not answer, within `MISS_S`.
        """
        under_way = self._under_way.get(name)
        if under_way is not None:
            return under_way
        outcome = self._misses.get(name, now_s)
        if outcome is not None:
            answered: Future[Outcome] = Future()
            answered.set_result(outcome)
            return answered
        self._under_way[name] = Future()
        return None

    def note_miss(self, name: Name, now_s: float) -> None:
        """Note that a tier which was asked about the blocks before this one lacks it."""
        self._misses.note(name, Outcome.OK, now_s)

    def end(self, name: Name, found: int, now_s: float, outcome: Outcome = Outcome.OK) -> None:
        """Finish a lookup and wake the waiting callers; `found` is the number of blocks held."""
        self._under_way.pop(name).set_result(outcome)
        if found:
            self._misses.forget(name)
        else:
            self._misses.note(name, outcome, now_s)
