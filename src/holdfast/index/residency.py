"""Which blocks this store holds, and on which tiers: one row of flat columns per block.

One dict from key to row and flat columns: under 250 bytes a block at a million blocks. Chained keys
make a radix tree unnecessary: the longest held prefix is a walk over dict look-ups. Not
thread-safe: the store calls it under its lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import NamedTuple

from holdfast.blocks.world import World

NOT_HERE = -1


class Coverage(NamedTuple):
    """The leading run of a chain that is held: a row and the fastest tier for each block.

    `tiers[i]` counts from the fastest: 0 is the host. `world` says what every block has in common.
    """

    world: World
    rows: list[int]
    tiers: list[int]

    @property
    def blocks(self) -> int:
        """How many leading blocks are held."""
        return len(self.rows)


def _small() -> MutableSequence[int]:
    return array("q")


class Residency:
    """The index of one store over `tiers` tiers, fastest first.

    `column` makes the columns of places. Arrays are the smallest; lists take no more where places
    are few and small numbers, and are read and set several times sooner.
    """

    def __init__(self, tiers: int, column: Callable[[], MutableSequence[int]] = _small) -> None:
        self.keys: list[bytes | None] = []
        self.parents: list[bytes] = []
        self.depths = array("I")
        self.leases: list[int] = []
        self.places = [column() for _ in range(tiers)]
        self.worlds: list[World] = []
        """By number; those without a block wait for another world to take theirs."""
        self.worlds_named = 0
        """How often a number was given: one that is given again names another world."""
        self._world_ids: dict[World, int] = {}
        self._world_rows: list[int] = []
        self._worlds_free: list[int] = []
        self._world_of: list[int] = []
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def cover(self, world: World, keys: Sequence[bytes]) -> Coverage:
        """Return the longest leading run of `keys` that is held in this world."""
        rows: list[int] = []
        tiers: list[int] = []
        world_id = self._world_ids.get(world)
        if world_id is None:
            return Coverage(world, rows, tiers)
        find, worlds, places = self._rows.get, self._world_of, self.places
        host = places[0]
        for key in keys:
            row = find(key)
            if row is None or worlds[row] != world_id:
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
        return Coverage(world, rows, tiers)

    def held(self, world: World, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key, in any order: 1 if it is held in this world."""
        world_id = self._world_ids.get(world)
        if world_id is None:
            return bytes(len(keys))
        worlds, host = self._world_of, self.places[0]
        return bytes(
            [
                row >= 0 and worlds[row] == world_id and (host[row] >= 0 or self.fastest(row) >= 0)
                for row in self.find_all(keys)
            ]
        )

    def find(self, key: bytes) -> int:
        """Return the row of a key, or -1."""
        return self._rows.get(key, NOT_HERE)

    def find_all(self, keys: Sequence[bytes]) -> list[int]:
        """Return the row of each key, or -1."""
        find = self._rows.get
        return [find(key, NOT_HERE) for key in keys]

    def parent_rows(self, rows: Sequence[int]) -> list[int]:
        """Return for each row that of the block in front, or -1 if it is not held.

        Who names blocks may lie: one is in front only if it is less deep, so there are no rings,
        and in the same world, so nobody's block hangs on another domain's.
        """
        find, parents, depths, world = self._rows.get, self.parents, self.depths, self._world_of
        fronts = [find(parents[row], NOT_HERE) for row in rows]
        return [
            front
            if front >= 0 and depths[front] < depths[row] and world[front] == world[row]
            else NOT_HERE
            for row, front in zip(rows, fronts, strict=True)
        ]

    def world(self, row: int) -> World:
        """Return the world of a row."""
        return self.worlds[self._world_of[row]]

    def world_number(self, row: int) -> int:
        """Return the place of a row's world in `worlds`."""
        return self._world_of[row]

    def fastest(self, row: int) -> int:
        """Return the fastest tier that holds a row; -1 if none does."""
        for tier, column in enumerate(self.places):
            if column[row] >= 0:
                return tier
        return NOT_HERE

    def add(self, world: World, key: bytes, parent: bytes, depth: int) -> int:
        """Return the row of `key`, made if it was not there; it has no place yet when new."""
        row = self._rows.get(key)
        if row is not None:
            return row
        held = self._rows.get(parent)
        if held is not None:
            parent = self.keys[held] or parent
        return self._make(world, key, parent, depth)

    def extend(
        self, world: World, keys: Sequence[bytes], parents: Sequence[bytes], depths: Sequence[int]
    ) -> list[int]:
        """Return the rows of blocks, each behind its parent: `add` for each of them, but at once.

        A parent comes before its children.
        """
        if self._free or not self._rows.keys().isdisjoint(keys):
            each = zip(keys, parents, depths, strict=True)
            return [self.add(world, key, parent, depth) for key, parent, depth in each]
        count = len(keys)
        rows = list(range(len(self.keys), len(self.keys) + count))
        if not count:
            return rows
        world_id = self._world_ids.get(world)
        if world_id is None:
            world_id = self._name(world)
        self.keys += keys
        self.parents += parents
        self.depths.extend(depths)
        self.leases += [0] * count
        self._world_of += [world_id] * count
        for places in self.places:
            places.extend([NOT_HERE] * count)
        self._world_rows[world_id] += count
        self._rows.update(zip(keys, rows, strict=True))
        return rows

    def drop(self, row: int) -> None:
        """Forget a row that has no place and no lease left."""
        key = self.keys[row]
        if key is None:
            return
        del self._rows[key]
        self.keys[row], self.parents[row] = None, b""
        self._free.append(row)
        world_id = self._world_of[row]
        self._world_rows[world_id] -= 1
        if not self._world_rows[world_id]:
            del self._world_ids[self.worlds[world_id]]
            self._worlds_free.append(world_id)

    def rows(self) -> Iterator[int]:
        """Yield every row in use, in no order; the index must not change meanwhile."""
        return iter(self._rows.values())

    def _make(self, world: World, key: bytes, parent: bytes, depth: int) -> int:
        row = self._free.pop() if self._free else self._append()
        self.keys[row], self.parents[row] = key, parent
        world_id = self._world_ids.get(world)
        if world_id is None:
            world_id = self._name(world)
        self.depths[row], self._world_of[row] = depth, world_id
        self._world_rows[world_id] += 1
        self._rows[key] = row
        return row

    def _name(self, world: World) -> int:
        """Give a world a number, perhaps one whose world has no block here any more."""
        self.worlds_named += 1
        if self._worlds_free:
            number = self._worlds_free.pop()
            self.worlds[number] = world
        else:
            number = len(self.worlds)
            self.worlds.append(world)
            self._world_rows.append(0)
        self._world_ids[world] = number
        return number

    def _append(self) -> int:
        self.keys.append(None)
        self.parents.append(b"")
        self.depths.append(0)
        self.leases.append(0)
        self._world_of.append(0)
        for places in self.places:
            places.append(NOT_HERE)
        return len(self.keys) - 1
