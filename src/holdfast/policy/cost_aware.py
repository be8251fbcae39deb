"""Cost-aware: evict the leaf whose next use is expected furthest away, weighed by what it saves.

The value of a block is recompute time saved x chance of reuse / bytes. The first over the last is
its `worth`, which differs between models that share a store; the chance is told by when the block
is needed next. Where a hint says when (a tool call that takes a minute, a closed session), that is
what counts, as in Belady, "A study of replacement algorithms for a virtual-storage computer"
(1966), with the session's word for the oracle. Where none does, a block is expected back after as
long as it has lain unused already: what is known of a lifetime without scale (Lindy's law). So
without hints, and for one model, this is leaf-first LRU exactly; a hint that proves wrong ages like
a use at the moment it named; and hinted and plain chains share one order.

A closed session gives up what only it used: what several chains here build upon, or what was used
long before it was expected, stays until it is old.

Do not use it with hints from a client that gains by lying: who always says "in a second" keeps
everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from heapq import heappop, heappush, heapreplace

from holdfast.policy.base import NEVER
from holdfast.policy.tree import Tree

_UNHINTED = -math.inf
_SPARE = 64
"""Entries that heaps may always have beyond three a row before they are tidied."""

_EARLY = 0.5
"""A use before this share of the time until it was expected is another session's."""

_STEPS = 2
"""Shelves for every doubling of worth."""

_WORTH_MIN, _WORTH_MAX = 1e-6, 1e6


class _Shelf:
    """Leaves of about one worth, by when they are needed: from the earliest, and from the latest.

    Entries may be stale; only the top ones are made true.
    """

    def __init__(self, worth: float) -> None:
        self.worth = worth
        self.past: list[tuple[float, int]] = []
        self.future: list[tuple[float, int]] = []

    def furthest(self, now_s: float) -> tuple[float, int]:
        """Return how far off the furthest leaf is, for its worth, and its row; no row: -1."""
        if not self.past:
            return -1.0, -1
        when, row = self.past[0]
        far = abs(now_s - when)
        if self.future and -self.future[0][0] - now_s > far:
            when, row = self.future[0]
            far = -when - now_s
        return far / self.worth, row


class CostAware:
    """One number a leaf: when it was used, or will be; the one furthest from now goes.

    38 bytes a row and 24 for each use that is still the last one of some row; O(log leaves) an
    eviction. As in `LeafLru`, uses and hints are noted at the last row of a chain and handed on to
    the parent with the removal of a child. Columns that are read most are lists: arrays, half as
    large, make a number of every item that is read.
    """

    def __init__(self) -> None:
        self._used: list[float] = []
        self._hint: list[float] = []
        self._shared = bytearray()
        self._tree = Tree(self._used, self._hint, self._shared)
        self._now_s = -math.inf
        self._in_front = -1
        self._worth: Callable[[int], float] | None = None
        self._usual = _Shelf(1.0)
        self._shelves = {0: self._usual}
        self._entries = 0

    def insert(
        self, rows: Sequence[int], parents: Sequence[int], names: Sequence[Hashable], now_s: float
    ) -> None:
        """Add the rows of a chain, just used and expected at no time known."""
        del names
        tree, used, hint, shared = self._tree, self._used, self._hint, self._shared
        tree.add(rows, parents)
        children, front, stamp = tree.children, self._in_front, self._now_s
        for row, parent in zip(rows[::-1], parents[::-1]):  # noqa: B905  # of one length by now
            if row != front:  # a chain was used once: its blocks have one stamp
                stamp = self._stamp(now_s)
            front = parent
            used[row] = stamp
            hint[row] = _UNHINTED
            if parent >= 0 and children[parent] > 1:
                shared[parent] = 1
            if not children[row]:
                self._push(row)
        self._in_front = front
        if self._entries > 3 * tree.rows + _SPARE:
            self._tidy()

    def touch(self, rows: Sequence[int], now_s: float) -> None:
        """Note one use of a chain's leading rows; what was expected of its last has happened."""
        tree, stamp = self._tree, self._stamp(now_s)
        here, holes, known = tree.here, tree.holes, len(tree.here)
        for row in reversed(rows):
            if 0 <= row < known and here[row]:
                if self._hint[row] == _UNHINTED:
                    self._used[row] = stamp
                else:
                    self._end_hint(row, stamp)
                if not holes:
                    return

    def pass_by(self, row: int, now_s: float) -> None:
        """Put a row in use behind the others, unless it is known when it is needed."""
        if self._tree.is_here(row) and self._hint[row] == _UNHINTED:
            self._used[row] = self._stamp(now_s)

    def expect(self, rows: Sequence[int], at_s: float) -> None:
        """Note when a chain is needed again, at its last row here."""
        tree = self._tree
        for row in reversed(rows):
            if tree.is_here(row):
                self._hint[row] = _UNHINTED if at_s == NEVER and self._shared[row] else at_s
                if not tree.children[row]:
                    self._line_up(row)
                if not tree.holes:
                    return

    def remove(self, row: int) -> None:
        """Take a row out; its parent is needed when it was, and may become a leaf."""
        tree, used, hint = self._tree, self._used, self._hint
        parent, past = tree.take(row), self._usual.past
        first = bool(past) and past[0][1] == row  # in line, where it should not be any more
        if parent >= 0:
            if hint[parent] == hint[row] == _UNHINTED:
                if used[row] > used[parent]:  # noqa: PLR1730  # a call takes longer
                    used[parent] = used[row]
            else:
                self._inherit(parent, row)
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
        """Cut a row off from its children."""
        self._tree.forget(row)
        if row < len(self._shared):
            self._shared[row] = 0

    def weigh_by(self, worth: Callable[[int], float]) -> None:
        """Ask this what a row is worth when it is lined up; steps of 1.4 are told apart."""
        self._worth = worth

    def victims(self, now_s: float) -> Generator[int, None, None]:
        """Yield leaves, the one whose expected use is furthest away for its worth first."""
        if now_s < self._now_s:  # noqa: PLR1730  # a call takes longer
            now_s = self._now_s
        self._now_s = now_s
        here, children, used, hint = self._tree.here, self._tree.children, self._used, self._hint
        usual, shelves = self._usual, self._shelves
        past = usual.past
        left: set[int] = set()
        try:
            while True:
                if usual.future or len(shelves) > 1:
                    row = self._furthest(now_s, left)
                elif past:
                    when, row = past[0]
                    true = when == used[row] and hint[row] == _UNHINTED
                    if not true or not here[row] or children[row] or row in left:
                        row = self._settle(past, left, 1.0)
                else:
                    return
                if row < 0:
                    return
                yield row
                if here[row]:
                    left.add(row)
        finally:
            for row in left:
                if here[row] and not children[row]:
                    self._push(row)

    def _furthest(self, now_s: float, left: set[int]) -> int:
        """Return the row that is furthest off for its worth, of those not in `left`; -1: none.

        Of equals that of the least worth.
        """
        far, least, row = -1.0, 0.0, -1
        for shelf in self._shelves.values():
            self._settle(shelf.past, left, 1.0)
            if shelf.future:
                self._settle(shelf.future, left, -1.0)
            distance, furthest = shelf.furthest(now_s)
            if distance > far or (distance == far and shelf.worth < least):
                far, least, row = distance, shelf.worth, furthest
        return row

    def _end_hint(self, row: int, stamp: float) -> None:
        """Stamp what was expected; used long before that, it serves more than one session."""
        used, hint = self._used[row], self._hint[row]
        self._used[row] = stamp
        if stamp - used < _EARLY * (hint - used):
            self._shared[row] = 1
        self._hint[row] = _UNHINTED
        if not self._tree.children[row]:  # perhaps it stands where it was expected
            self._line_up(row)

    def _stamp(self, now_s: float) -> float:
        """Return now, or a hair more: no two uses have the same time."""
        if now_s <= self._now_s:
            now_s = math.nextafter(self._now_s, math.inf)
        self._now_s = now_s
        return now_s

    def _push(self, row: int) -> None:
        shelf = self._usual if self._worth is None else self._shelf(self._worth(row))
        when = self._hint[row]
        self._entries += 1
        if when == _UNHINTED:
            heappush(shelf.past, (self._used[row], row))
            return
        heappush(shelf.past, (when, row))
        if when > self._now_s:
            self._entries += 1
            heappush(shelf.future, (-when, row))

    def _shelf(self, worth: float) -> _Shelf:
        step = round(_STEPS * math.log2(min(max(worth, _WORTH_MIN), _WORTH_MAX)))
        shelf = self._shelves.get(step)
        if shelf is None:
            shelf = self._shelves[step] = _Shelf(2.0 ** (step / _STEPS))
        return shelf

    def _line_up(self, row: int) -> None:
        """Push a leaf that may be in line already."""
        self._push(row)
        if self._entries > 3 * self._tree.rows + _SPARE:
            self._tidy()

    def _tidy(self) -> None:
        """Drop what is stale, once that has become more than the leaves can be."""
        self._entries = 0
        pasts = [shelf.past for shelf in self._shelves.values()]
        rows = {each for past in pasts for _, each in past if self._tree.is_leaf(each)}
        self._usual = _Shelf(1.0)
        self._shelves = {0: self._usual}
        for each in rows:
            self._push(each)

    def _settle(self, heap: list[tuple[float, int]], passed: set[int], sign: float) -> int:
        """Bring an entry that is true to the top of a heap; return its row, -1 if there is none."""
        here, children = self._tree.here, self._tree.children
        while heap:
            key, row = heap[0]
            if not here[row] or children[row] or row in passed:
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

    def _inherit(self, parent: int, child: int) -> None:
        """Hand on what is known of a child: the last use, and the nearest hint still ahead."""
        used, hint, now_s = self._used, self._hint, self._now_s
        ahead = [h for h in (hint[parent], hint[child]) if now_s < h < math.inf]
        if used[child] >= used[parent]:
            used[parent] = used[child]
            closed = hint[child] == NEVER
            hint[parent] = _UNHINTED if closed and self._shared[parent] else hint[child]
        if ahead:
            hint[parent] = min(ahead)
