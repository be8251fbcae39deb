"""Index of the blocks that a store holds, and of their tiers: one row in flat columns per block.

One dict from key to row per `Namespace`, and flat columns: under 250 bytes a block at a million
blocks. A key in two namespaces names two blocks, in two rows. Keys are chained, so the longest held
prefix is found by dict lookups, without a radix tree. Not thread-safe: the store calls it under its
lock.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from itertools import chain
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace, namespace_tag
from holdfast.buffers import ALIGNMENT

NOT_HERE = -1


class Coverage(NamedTuple):
    """The leading run of a chain that is held: the row and the fastest tier of each block.

    `tiers[i]` counts from the fastest: 0 is the host. All blocks are of `namespace`.
    """

    namespace: Namespace
    rows: list[int]
    tiers: list[int]

    @property
    def blocks(self) -> int:
        """Number of leading blocks held."""
        return len(self.rows)


class Residency:
    """The index of one store over `tiers` tiers, fastest first.

    `column` creates the columns of places (one per tier). Arrays are the smallest. Lists are read
    and written several times faster, and take no more memory if all places are small integers.
    """

    def __init__(
        self, tiers: int, column: Callable[[], MutableSequence[int]] = lambda: array("q")
    ) -> None:
        self.keys: list[bytes | None] = []
        self.parents: list[bytes] = []
        self.depths = array("I")
        self.leases: list[int] = []
        self.places = [column() for _ in range(tiers)]
        self._sizes = [array("I") for _ in range(tiers)]
        """By tier: the stored size of each row's copy in units of `ALIGNMENT`, up to the last row
        with a copy that is shorter than a slot. 0: as long as a slot."""
        self.namespaces: list[Namespace] = []
        """By number. The number of a namespace without blocks is free for another namespace."""
        self.namespaces_named = 0
        """Count of numbers assigned; it changes when a number may name another namespace."""
        self._namespace_ids: dict[Namespace, int] = {}
        self._namespaces_free: list[int] = []
        self._namespace_of: list[int] = []
        self._rows: list[dict[bytes, int]] = []
        """By namespace number: the row of each key."""
        self.tags: list[bytes] = []
        """By namespace number: the prefix of its blocks' names."""
        self._tag_key = secrets.token_bytes(16)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.keys) - len(self._free)

    def cover(self, namespace: Namespace, keys: Sequence[bytes]) -> Coverage:
        """Return the longest leading run of `keys` that is held in this namespace."""
        rows: list[int] = []
        tiers: list[int] = []
        namespace_id = self._namespace_ids.get(namespace)
        if namespace_id is None:
            return Coverage(namespace, rows, tiers)
        find, places = self._rows[namespace_id].get, self.places
        host = places[0]
        for key in keys:
            row = find(key)
            if row is None:
                break
            tier = 0
            if host[row] < 0:
                for column in places:
                    if column[row] >= 0:
                        break
                    tier += 1
                else:
                    break
            rows.append(row)
            tiers.append(tier)
        return Coverage(namespace, rows, tiers)

    def held(self, namespace: Namespace, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key, in any order: 1 if it is held in this namespace."""
        host = self.places[0]
        return bytes(
            [
                row >= 0 and (host[row] >= 0 or self.fastest(row) >= 0)
                for row in self.find_all(namespace, keys)
            ]
        )

    def find(self, namespace: Namespace, key: bytes) -> int:
        """Return the row of a key in a namespace; -1 if it has none."""
        namespace_id = self._namespace_ids.get(namespace)
        return NOT_HERE if namespace_id is None else self._rows[namespace_id].get(key, NOT_HERE)

    def find_all(self, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
        """Return the row of each key in a namespace; -1 for a key without a row."""
        namespace_id = self._namespace_ids.get(namespace)
        if namespace_id is None:
            return [NOT_HERE] * len(keys)
        find = self._rows[namespace_id].get
        return [find(key, NOT_HERE) for key in keys]

    def parent_rows(self, rows: Sequence[int]) -> list[int]:
        """Return the row of each row's parent in the same namespace; -1 if it is not held.

        Clients supply keys and parents, and may be malicious. A parent counts only if its depth is
        smaller, so the parents form no cycle.
        """
        dicts, namespace = self._rows, self._namespace_of
        parents, depths = self.parents, self.depths
        found = [dicts[namespace[row]].get(parents[row], NOT_HERE) for row in rows]
        return [
            parent if parent >= 0 and depths[parent] < depths[row] else NOT_HERE
            for row, parent in zip(rows, found, strict=True)
        ]

    def name(self, row: int) -> bytes:
        """Return the name of a row's block, which is unique across namespaces.

        24 bytes: a tag of the namespace, then the key. A block's name is stable for the lifetime of
        this index. The tag is keyed with random bytes, so that a client cannot choose a key whose
        name collides with one of another namespace. A row without a block has the bare tag.
        """
        return self.tags[self._namespace_of[row]] + (self.keys[row] or b"")

    def names(self, rows: Sequence[int]) -> list[bytes]:
        """Return the `name` of each row's block."""
        tags, namespace, keys = self.tags, self._namespace_of, self.keys
        return [tags[namespace[row]] + (keys[row] or b"") for row in rows]

    def namespace(self, row: int) -> Namespace:
        """Return the namespace of a row."""
        return self.namespaces[self._namespace_of[row]]

    def namespace_number(self, row: int) -> int:
        """Return the index of a row's namespace in `namespaces`."""
        return self._namespace_of[row]

    def stored_bytes(self, row: int, tier: int) -> int:
        """Return the bytes of the copy of a row that was noted last on a tier."""
        sizes = self._sizes[tier]
        units = sizes[row] if row < len(sizes) else 0
        return units * ALIGNMENT or self.namespace(row).slot_bytes

    def note_stored(self, row: int, tier: int, nbytes: int) -> None:
        """Record the bytes of the copy of a row on a tier; call it for each copy."""
        sizes = self._sizes[tier]
        units = nbytes // ALIGNMENT if nbytes < self.namespace(row).slot_bytes else 0
        if row >= len(sizes):
            if not units:
                return
            sizes.extend([0] * (row + 1 - len(sizes)))
        sizes[row] = units

    def fastest(self, row: int) -> int:
        """Return the fastest tier that holds a row; -1 if none does."""
        for tier, column in enumerate(self.places):
            if column[row] >= 0:
                return tier
        return NOT_HERE

    def tiers(self, row: int) -> list[int]:
        """Return the tiers that hold a row, fastest first."""
        return [tier for tier, column in enumerate(self.places) if column[row] >= 0]

    def add(self, namespace: Namespace, key: bytes, parent: bytes, depth: int) -> int:
        """Return the row of `key`, creating it if necessary; a new row has no place."""
        namespace_id = self._namespace_ids.get(namespace)
        if namespace_id is None:
            namespace_id = self._name(namespace)
        rows = self._rows[namespace_id]
        row = rows.get(key)
        if row is not None:
            return row
        parent_row = rows.get(parent)
        if parent_row is not None:
            parent = self.keys[parent_row] or parent  # share the bytes object
        if self._free:
            row = self._free.pop()
        else:
            row = len(self.keys)
            self.keys.append(None)
            self.parents.append(b"")
            self.depths.append(0)
            self.leases.append(0)
            self._namespace_of.append(0)
            for places in self.places:
                places.append(NOT_HERE)
        rows[key] = row
        self.keys[row], self.parents[row] = key, parent
        self.depths[row], self._namespace_of[row] = depth, namespace_id
        return row

    def extend(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        depths: Sequence[int],
    ) -> list[int]:
        """Return the rows of many blocks: as `add` for each, but faster. Parents come first."""
        if not keys:
            return []
        namespace_id = self._namespace_ids.get(namespace)
        if namespace_id is None:
            namespace_id = self._name(namespace)
        if self._free or not self._rows[namespace_id].keys().isdisjoint(keys):
            each = zip(keys, parents, depths, strict=True)
            return [self.add(namespace, key, parent, depth) for key, parent, depth in each]
        count = len(keys)
        rows = list(range(len(self.keys), len(self.keys) + count))
        self.keys += keys
        self.parents += parents
        self.depths.extend(depths)
        self.leases += [0] * count
        self._namespace_of += [namespace_id] * count
        for places in self.places:
            places.extend([NOT_HERE] * count)
        self._rows[namespace_id].update(zip(keys, rows, strict=True))
        return rows

    def drop(self, row: int) -> None:
        """Remove a row that has no place and no lease."""
        key = self.keys[row]
        if key is None:
            return
        namespace_id = self._namespace_of[row]
        rows = self._rows[namespace_id]
        del rows[key]
        self.keys[row], self.parents[row] = None, b""
        self._free.append(row)
        if not rows:
            self._rows[namespace_id] = {}  # because an emptied dict keeps its memory
            del self._namespace_ids[self.namespaces[namespace_id]]
            self._namespaces_free.append(namespace_id)

    def rows(self) -> Iterator[int]:
        """Yield every row in use, unordered; the index must not change during the iteration."""
        return chain.from_iterable(rows.values() for rows in self._rows)

    def _name(self, namespace: Namespace) -> int:
        """Assign a number to a namespace, reusing that of a namespace without blocks."""
        self.namespaces_named += 1
        tag = namespace_tag(namespace, self._tag_key)
        if self._namespaces_free:
            number = self._namespaces_free.pop()
            self.namespaces[number], self.tags[number] = namespace, tag
        else:
            number = len(self.namespaces)
            self.namespaces.append(namespace)
            self.tags.append(tag)
            self._rows.append({})
        self._namespace_ids[namespace] = number
        return number
