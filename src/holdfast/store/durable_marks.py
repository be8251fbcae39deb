"""Durable marks: the blocks that were saved as durable, each until a time.

A mark names a block, whether a tier holds it or not, so it outlives a copy. `store/marks_file.py`
keeps marks through a restart. Marks of this process end by its monotonic clock, because a machine
may set its wall clock while the process runs. Those of an earlier process end by the wall clock,
but none of them ends in the first `BELIEVED_AFTER_S` after the start or after the clock was set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from holdfast.blocks.key import unpack_keys
from holdfast.blocks.namespace import Namespace
from holdfast.clock import Clock
from holdfast.prepared import prepared

MARKS_MAX = 1 << 18
"""Maximum marks of a store, of about 100 bytes of memory each. Beyond it, the oldest mark of the
namespace with the most marks is forgotten."""

BELIEVED_AFTER_S = 3_600.0
"""Time in seconds after which a wall clock that differs from before counts as right: a clock that
is wrong at the start of a machine is set within minutes."""

CLOCK_STEP_S = 60.0
"""Difference in seconds between wall and monotonic clock from which the wall clock was set."""


class MarkEnd(NamedTuple):
    """When a mark ends, by two clocks; the later end counts.

    `wall_s`: seconds since 1970, of a mark of an earlier process. `steady_s`: monotonic seconds, of
    a mark of this process. -inf: it is of the other process only.
    """

    wall_s: float
    steady_s: float


_NONE: Mapping[bytes, MarkEnd] = MappingProxyType({})


@prepared
class MarkedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one namespace that are durable until a time; a record of the file.

    `until_s`: seconds since 1970; 0: they are durable no more. `keys`: 16 bytes each.
    """

    namespace: Namespace
    until_s: float
    keys: bytes


class DurableMarks:
    """The marks of one store. State only: call it under the store's lock.

    `wall_s` returns seconds since 1970, because marks outlive the process.
    """

    def __init__(self, clock: Clock, wall_s: Callable[[], float]) -> None:
        self._clock = clock
        self._wall_s = wall_s
        self._ends: dict[Namespace, dict[bytes, MarkEnd]] = {}
        """By namespace and key, the oldest mark of a namespace first."""
        self._count = 0
        self._unsaved: list[MarkedBlocks] = []
        self._offset_s = wall_s() - clock.now()
        self._believed_at_s = self._expire_at_s = clock.now() + BELIEVED_AFTER_S
        self._is_set = False

    def __len__(self) -> int:
        """Return the number of marks, with those that have ended until `expire`."""
        return self._count

    def names(self) -> list[tuple[Namespace, bytes]]:
        """Return every marked block, without those whose mark has ended if the clock is right."""
        wall_s, steady_s = self._now()
        return [
            (namespace, key)
            for namespace, keys in self._ends.items()
            for key, end in keys.items()
            if end.wall_s > wall_s or end.steady_s > steady_s
        ]

    def holds(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether a block is marked now."""
        end = self._ends.get(namespace, _NONE).get(key)
        return end is not None and not self._is_over(end, *self._now())

    def until_s(self, namespace: Namespace, keys: Iterable[bytes]) -> float:
        """Return when the last mark of these blocks ends, in seconds since 1970; 0: none is."""
        marked, now = self._ends.get(namespace, _NONE), self._now()
        return max((_wall_end(marked[key], *now) for key in keys if key in marked), default=0.0)

    def add(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> None:
        """Mark blocks for `for_s` seconds from now; a mark that ends later stays."""
        wall_s, steady_s = self._now()
        end = MarkEnd(-math.inf, steady_s + for_s)
        added = [key for key in keys if self._extend(namespace, key, end)]
        if added:
            self._unsaved.append(MarkedBlocks(namespace, wall_s + for_s, b"".join(added)))

    def remove(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Remove the marks of blocks that are dropped by name."""
        marked = self._ends.get(namespace)
        if marked is None:
            return
        removed = [key for key in keys if marked.pop(key, None) is not None]
        self._count -= len(removed)
        if removed:
            self._unsaved.append(MarkedBlocks(namespace, 0.0, b"".join(removed)))

    def remove_all(self, is_wanted: Callable[[Namespace], bool]) -> None:
        """Remove the marks of all blocks of the namespaces that are wanted."""
        for namespace in filter(is_wanted, list(self._ends)):
            self.remove(namespace, list(self._ends[namespace]))
            del self._ends[namespace]

    def restore(self, runs: Iterable[MarkedBlocks]) -> None:
        """Add what an earlier process left; marks of this one that end later stay."""
        for run in runs:
            for key in unpack_keys(run.keys):
                if run.until_s:
                    self._extend(run.namespace, key, MarkEnd(run.until_s, -math.inf))
                else:
                    self._count -= self._ends.get(run.namespace, {}).pop(key, None) is not None

    def expire(self) -> None:
        """Forget the marks that have ended."""
        now = self._now()
        self._expire_at_s = now[1] + BELIEVED_AFTER_S
        for namespace, marked in list(self._ends.items()):
            left = {key: end for key, end in marked.items() if not self._is_over(end, *now)}
            self._count -= len(marked) - len(left)
            self._ends[namespace] = left
            if not left:
                del self._ends[namespace]

    def expire_if_due(self) -> None:
        """As `expire`, but only if it was not called in the last `BELIEVED_AFTER_S`."""
        if self._clock.now() >= self._expire_at_s:
            self.expire()

    def take_clock_change(self) -> bool:
        """Return, once, that the wall clock was set, so that the file has wrong times."""
        self._now()
        is_set, self._is_set = self._is_set, False
        return is_set and self._count > 0

    def take_unsaved(self) -> list[MarkedBlocks]:
        """Return what changed since the last call, to be written to the file."""
        unsaved, self._unsaved = self._unsaved, []
        return unsaved

    def all(self) -> list[MarkedBlocks]:
        """Return every mark, to rewrite the file."""
        now = self._now()
        runs: dict[tuple[Namespace, MarkEnd], list[bytes]] = {}
        for namespace, marked in self._ends.items():
            for key, end in marked.items():
                runs.setdefault((namespace, end), []).append(key)
        return [
            MarkedBlocks(namespace, _wall_end(end, *now), b"".join(keys))
            for (namespace, end), keys in runs.items()
        ]

    def _now(self) -> tuple[float, float]:
        """Return the time by the wall clock and by the monotonic one; note that it was set."""
        wall_s, steady_s = self._wall_s(), self._clock.now()
        if abs(wall_s - steady_s - self._offset_s) > CLOCK_STEP_S:
            self._offset_s = wall_s - steady_s
            self._believed_at_s = steady_s + BELIEVED_AFTER_S
            self._is_set = True
        return wall_s, steady_s

    def _is_over(self, end: MarkEnd, wall_s: float, steady_s: float) -> bool:
        """Return whether a mark has ended at a time, by the clock that counts for it."""
        is_of_earlier = end.wall_s > -math.inf
        if is_of_earlier and (end.wall_s > wall_s or steady_s < self._believed_at_s):
            return False
        return end.steady_s <= steady_s

    def _extend(self, namespace: Namespace, key: bytes, end: MarkEnd) -> bool:
        """Mark a block until a time at least; False if it is marked for longer by this process."""
        marked = self._ends.setdefault(namespace, {})
        before = marked.pop(key, None)
        if before is None:
            self._count += 1
            marked[key] = end
        else:
            marked[key] = MarkEnd(*map(max, before, end))
        if self._count > MARKS_MAX:
            largest = max(self._ends.values(), key=len)
            del largest[next(iter(largest))]
            self._count -= 1
        return before is None or before.steady_s < end.steady_s


def _wall_end(end: MarkEnd, wall_s: float, steady_s: float) -> float:
    """Return when a mark ends, in seconds since 1970, if `wall_s` is the right time now."""
    return max(end.wall_s, wall_s + end.steady_s - steady_s)
