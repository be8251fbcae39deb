"""Cost-aware eviction: evict the leaf with the furthest expected use, weighed by its worth.

The value of a block is recompute time saved x probability of reuse / bytes. Recompute time per byte
is its `worth`, which differs between models that share a store; the probability follows from the
expected time of the next use. A hint gives that time (a tool call that takes a minute, a closed
session); it replaces the oracle in Belady, "A study of replacement algorithms for a virtual-storage
computer" (1966). Without a hint, the expected time until the next use equals the time since the
last one, as for a scale-free lifetime (Lindy's law). So without hints, and for one model, the order
is exactly leaf-first LRU. A wrong hint ages like a use at the time that it gave. Chains with and
without hints share one order.

When a session closes, the blocks that only it used become the first victims. Blocks with several
children, or used long before their hint, count as shared and stay until they are old.

Do not use it with hints from untrusted clients: a client that always hints "in a second" keeps all
its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from heapq import heappop, heappush, heapreplace

from holdfast.policy.base import NEVER
from holdfast.policy.tree import PrefixTree

_UNHINTED = -math.inf
_SPARE = 64
"""Heap entries allowed beyond three per row before stale ones are removed."""

_EARLY = 0.5
"""A use before this share of the time until the hint counts as that of another session."""

_STEPS = 2
"""Number of buckets per doubling of worth."""

_WORTH_MIN, _WORTH_MAX = 1e-6, 1e6


class _WorthBucket:
    """The leaves of similar worth in two heaps of (time of use, row): earliest and latest first.

    The time is the last use or the hint; `future` has only hints, with negative times. Entries may
    be stale: only the top ones are corrected.
    """

    def __init__(self, worth: float) -> None:
        self.worth = worth
        self.past: list[tuple[float, int]] = []
        self.future: list[tuple[float, int]] = []

    def furthest(self, now_s: float) -> tuple[float, int]:
        """Return the leaf furthest from now: its distance divided by worth, and its row or -1."""
        if not self.past:
            return -1.0, -1
        when, row = self.past[0]
        distance_s = abs(now_s - when)
        if self.future and -self.future[0][0] - now_s > distance_s:
            when, row = self.future[0]
            distance_s = -when - now_s
        return distance_s / self.worth, row


class CostAware:
    """Orders leaves by the time of their last or expected use; evicts the furthest from now.

    38 bytes a row and 24 for each distinct last use; O(log leaves) an eviction. Uses and hints are
    recorded at the last row of a chain, and passed to the parent when a child is removed, so the
    cost of a use does not depend on the length of the chain. The columns read most are lists:
    arrays take half the memory, but create an object on every read.
    """

    def __init__(self) -> None:
        self._used: list[float] = []
        self._hint: list[float] = []
        self._shared = bytearray()
        self._tree = PrefixTree(self._used, self._hint, self._shared)
        self._now_s = -math.inf
        self._last_parent = -1
        self._worth: Callable[[int], float] | None = None
        self._default = _WorthBucket(1.0)
        self._buckets = {0: self._default}
        self._entries = 0

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add the rows of a chain, just used and without a hint."""
        del names
        tree, used, hint, shared = self._tree, self._used, self._hint, self._shared
        tree.add(rows, parents)
        children, last_parent, stamp = tree.children, self._last_parent, self._now_s
        for row, parent in zip(rows[::-1], parents[::-1]):  # noqa: B905  # `add` checked the length
            if row != last_parent:  # the blocks of one chain share one time
                stamp = self._stamp(now_s)
            last_parent = parent
            used[row] = stamp
            hint[row] = _UNHINTED
            if parent >= 0 and children[parent] > 1:
                shared[parent] = 1
            if not children[row]:
                self._push(row)
        self._last_parent = last_parent
        if self._entries > 3 * tree.rows + _SPARE:
            self._compact()

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Record one use of a chain's leading rows, which ends the hint of its last row."""
        tree, stamp = self._tree, self._stamp(now_s)
        here, holes, known = tree.here, tree.holes, len(tree.here)
        for row in reversed(rows):
            if 0 <= row < known and here[row]:
                last, hint = self._used[row], self._hint[row]
                self._used[row] = stamp
                if hint != _UNHINTED:
                    if stamp - last < _EARLY * (hint - last):
                        self._shared[row] = 1
                    self._hint[row] = _UNHINTED
                    if not tree.children[row]:  # its entries may have the hint's time
                        self._push_again(row)
                if not holes:
                    return

    def pass_by(self, row: int, now_s: float) -> None:
        """Move a row in use behind the others, unless it has a hint."""
        if self._tree.is_here(row) and self._hint[row] == _UNHINTED:
            self._used[row] = self._stamp(now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Set the hint of a chain, at its last known row."""
        tree = self._tree
        for row in reversed(rows):
            if tree.is_here(row):
                self._hint[row] = _UNHINTED if at_s == NEVER and self._shared[row] else at_s
                if not tree.children[row]:
                    self._push_again(row)
                if not tree.holes:
                    return

    def remove(self, row: int) -> None:
        """Remove a row; its parent inherits its last use and hint, and may become a leaf."""
        tree, used, hint = self._tree, self._used, self._hint
        parent, past = tree.take(row), self._default.past
        first = bool(past) and past[0][1] == row  # its entry is on top, so remove or replace it
        if parent >= 0:
            if hint[parent] == hint[row] == _UNHINTED:
                if used[row] > used[parent]:  # noqa: PLR1730  # calling max is slower
                    used[parent] = used[row]
            else:
                times = hint[parent], hint[row]
                future = [each for each in times if self._now_s < each < math.inf]
                if used[row] >= used[parent]:
                    used[parent] = used[row]
                    closed = hint[row] == NEVER
                    hint[parent] = _UNHINTED if closed and self._shared[parent] else hint[row]
                if future:
                    hint[parent] = min(future)
            if not tree.children[parent]:
                if first and hint[parent] == _UNHINTED and self._worth is None:
                    heapreplace(past, (used[parent], parent))
                else:
                    self._push(parent)
                return
        if first:
            heappop(past)
            self._entries -= 1

    def forget(self, row: int) -> None:
        self._tree.forget(row)
        if row == self._last_parent:  # a new block in this row does not continue the last chain
            self._last_parent = -1
        if row < len(self._shared):
            self._shared[row] = 0

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """Set the function of a row's worth, which is read on insertion and rounded to a bucket."""
        self._worth = worth

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves by the distance of their expected use divided by worth, largest first."""
        if now_s < self._now_s:  # noqa: PLR1730  # calling max is slower
            now_s = self._now_s
        self._now_s = now_s
        here, children, used, hint = self._tree.here, self._tree.children, self._used, self._hint
        default, buckets = self._default, self._buckets
        past = default.past
        skipped: set[int] = set()
        try:
            while True:
                if default.future or len(buckets) > 1:
                    row = self._furthest(now_s, skipped)
                elif past:
                    when, row = past[0]
                    current = when == used[row] and hint[row] == _UNHINTED
                    if not current or not here[row] or children[row] or row in skipped:
                        row = self._drop_stale(past, skipped, 1.0)
                else:
                    return
                if row < 0:
                    return
                yield row
                if here[row]:
                    skipped.add(row)
        finally:
            for row in skipped:
                if here[row] and not children[row]:
                    self._push(row)

    def _furthest(self, now_s: float, skipped: set[int]) -> int:
        """Return the leaf not in `skipped` with the largest distance per worth; -1 if none is left.

        Of equal leaves, return the one with the least worth.
        """
        largest, least, row = -1.0, 0.0, -1
        for bucket in self._buckets.values():
            self._drop_stale(bucket.past, skipped, 1.0)
            if bucket.future:
                self._drop_stale(bucket.future, skipped, -1.0)
            distance, furthest = bucket.furthest(now_s)
            if distance > largest or (distance == largest and bucket.worth < least):
                largest, least, row = distance, bucket.worth, furthest
        return row

    def _stamp(self, now_s: float) -> float:
        """Return `now_s`, or slightly more, so that no two uses have the same time."""
        if now_s <= self._now_s:
            now_s = math.nextafter(self._now_s, math.inf)
        self._now_s = now_s
        return now_s

    def _push(self, row: int) -> None:
        bucket = self._default
        if self._worth is not None and (worth := self._worth(row)) != 1.0:
            worth = min(max(worth, _WORTH_MIN), _WORTH_MAX)
            step = round(_STEPS * math.log2(worth))
            if step not in self._buckets:
                self._buckets[step] = _WorthBucket(2.0 ** (step / _STEPS))
            bucket = self._buckets[step]
        when = self._hint[row]
        self._entries += 1
        if when == _UNHINTED:
            heappush(bucket.past, (self._used[row], row))
            return
        heappush(bucket.past, (when, row))
        if when > self._now_s:
            self._entries += 1
            heappush(bucket.future, (-when, row))

    def _push_again(self, row: int) -> None:
        """Push a leaf whose time changed; its earlier entries become stale."""
        self._push(row)
        if self._entries > 3 * self._tree.rows + _SPARE:
            self._compact()

    def _compact(self) -> None:
        """Rebuild the heaps without stale entries."""
        self._entries = 0
        pasts = [bucket.past for bucket in self._buckets.values()]
        rows = {each for past in pasts for _, each in past if self._tree.is_leaf(each)}
        self._default = _WorthBucket(1.0)
        self._buckets = {0: self._default}
        for each in rows:
            self._push(each)

    def _drop_stale(self, heap: list[tuple[float, int]], skipped: set[int], sign: float) -> int:
        """Remove stale entries from the top of a heap; return the top's row, -1 if it is empty."""
        here, children = self._tree.here, self._tree.children
        while heap:
            key, row = heap[0]
            if not here[row] or children[row] or row in skipped:
                heappop(heap)
                self._entries -= 1
                continue
            when = self._hint[row]
            if when == _UNHINTED:
                when = self._used[row]
            if key == sign * when:
                return row
            heapreplace(heap, (sign * when, row))
        return -1
