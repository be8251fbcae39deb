"""Durable marks: the blocks that were saved as durable, each until a time.

A mark names a block, whether a tier holds it or not, so it outlives a copy. `store/marks_file.py`
keeps marks through a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from holdfast.blocks.key import unpack_keys
from holdfast.blocks.namespace import Namespace
from holdfast.prepared import prepared

MARKS_MAX = 1 << 18
"""Maximum marks of a store, of about 100 bytes of memory each. Beyond it, the oldest mark of the
namespace with the most marks is forgotten."""

_NONE: Mapping[bytes, float] = MappingProxyType({})


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

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._until: dict[Namespace, dict[bytes, float]] = {}
        """By namespace and key, the oldest mark of a namespace first."""
        self._count = 0
        self._unsaved: list[MarkedBlocks] = []

    def __len__(self) -> int:
        """Return the number of marks, with those that have ended until `expire`."""
        return self._count

    def names(self) -> list[tuple[Namespace, bytes]]:
        """Return every marked block."""
        return [(namespace, key) for namespace, keys in self._until.items() for key in keys]

    def holds(self, namespace: Namespace, key: bytes) -> bool:
        """Return whether a block is marked now."""
        until_s = self._until.get(namespace, _NONE).get(key)
        return until_s is not None and until_s > self._wall_s()

    def until_s(self, namespace: Namespace, keys: Iterable[bytes]) -> float:
        """Return when the last mark of these blocks ends, in seconds since 1970; 0: none is."""
        marked = self._until.get(namespace, _NONE)
        return max((marked.get(key, 0.0) for key in keys), default=0.0)

    def add(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> None:
        """Mark blocks for `for_s` seconds from now; a mark that ends later stays."""
        until_s = self._wall_s() + for_s
        added = [key for key in keys if self._extend(namespace, key, until_s)]
        if added:
            self._unsaved.append(MarkedBlocks(namespace, until_s, b"".join(added)))

    def remove(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Remove the marks of blocks that are dropped by name."""
        marked = self._until.get(namespace)
        if marked is None:
            return
        removed = [key for key in keys if marked.pop(key, None) is not None]
        self._count -= len(removed)
        if removed:
            self._unsaved.append(MarkedBlocks(namespace, 0.0, b"".join(removed)))

    def remove_all(self, is_wanted: Callable[[Namespace], bool]) -> None:
        """Remove the marks of all blocks of the namespaces that are wanted."""
        for namespace in filter(is_wanted, list(self._until)):
            self.remove(namespace, list(self._until[namespace]))
            del self._until[namespace]

    def restore(self, runs: Iterable[MarkedBlocks]) -> None:
        """Add what an earlier process left; marks of this one that end later stay."""
        for run in runs:
            for key in unpack_keys(run.keys):
                if run.until_s:
                    self._extend(run.namespace, key, run.until_s)
                else:
                    self._count -= self._until.get(run.namespace, {}).pop(key, None) is not None
        self.expire()

    def expire(self) -> None:
        """Forget the marks that have ended."""
        now_s = self._wall_s()
        for namespace, marked in list(self._until.items()):
            left = {key: until_s for key, until_s in marked.items() if until_s > now_s}
            self._count -= len(marked) - len(left)
            self._until[namespace] = left
            if not left:
                del self._until[namespace]

    def take_unsaved(self) -> list[MarkedBlocks]:
        """Return what changed since the last call, to be written to the file."""
        unsaved, self._unsaved = self._unsaved, []
        return unsaved

    def all(self) -> list[MarkedBlocks]:
        """Return every mark, to rewrite the file."""
        runs: dict[tuple[Namespace, float], list[bytes]] = {}
        for namespace, marked in self._until.items():
            for key, until_s in marked.items():
                runs.setdefault((namespace, until_s), []).append(key)
        return [MarkedBlocks(*name, b"".join(keys)) for name, keys in runs.items()]

    def _extend(self, namespace: Namespace, key: bytes, until_s: float) -> bool:
        """Mark a block until a time; False if it is marked for longer."""
        marked = self._until.setdefault(namespace, {})
        before_s = marked.pop(key, None)
        marked[key] = max(until_s, before_s or 0.0)
        if before_s is None:
            self._count += 1
        if self._count > MARKS_MAX:
            largest = max(self._until.values(), key=len)
            del largest[next(iter(largest))]
            self._count -= 1
        return before_s is None or before_s < until_s
