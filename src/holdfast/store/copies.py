"""The copies of a store's blocks: the state of each, and what waits for its change.

A copy is one record of a block on one tier. Its state is one of four:

    ABSENT ---> FILLING ---> HELD ---> LEAVING ---> ABSENT
       ^           |           |          |
       +-- failed -+-- evicted +          +--> HELD, if the tier keeps it after all

This module alone reads and writes the places of the index. `holdfast.store.block_table` decides
when a copy changes, and what follows from it: quotas, eviction order, write queues. State only:
call under the store's lock, except of `Filling.over` and the reads that a docstring names.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.blocks.namespace import Namespace
from holdfast.errors import Outcome
from holdfast.index.residency import Residency
from holdfast.store.copy_events import CopyEvents, CopyState
from holdfast.tiers.base import NOWHERE, Place


class CopyFault(NamedTuple):
    """A note for `inspect` about a block that failed verification or could not be read."""

    namespace: Namespace
    key: bytes
    tier: str
    outcome: Outcome


class BlockState(NamedTuple):
    """The state of one block.

    `tiers`: the tiers that hold a copy, fastest first; 0 is the host. `is_in_use`: it is leased, or
    being read into memory. `is_saved`: a tier whose contents outlive the process holds it, or a
    volatile lower tier does and no write is queued. `is_admitted`: it must be saved on a lower tier
    before it is evicted.
    """

    tiers: tuple[int, ...]
    is_in_use: bool
    is_saved: bool
    is_admitted: bool


class Filling:
    """A copy that is being made. Waiting for its end needs no lock.

    `over` is set when the copy is HELD or ABSENT. `waiting` counts the fetches that wait for it,
    without the one that started it. `is_dropped`: the block was dropped since, so the copy is not
    published.
    """

    __slots__ = ("is_dropped", "over", "waiting")

    def __init__(self) -> None:
        self.over = threading.Event()
        self.waiting = 0
        self.is_dropped = False

    def drop(self) -> None:
        """Note that the block was dropped after this copy was begun."""
        self.is_dropped = True


class CopyTable:
    """The copies of the blocks of one index, on its tiers: 0 is the host."""

    def __init__(self, index: Residency) -> None:
        self._index = index
        self._columns = index.places
        self.tiers = len(index.places)
        self._fillings: list[dict[int, Filling]] = [{} for _ in index.places]
        self._leaving: list[set[int]] = [set() for _ in index.places]
        self.events = CopyEvents(index)

    def state(self, row: int, tier: int) -> CopyState:
        """Return the state of a copy. A held copy that is being replaced is HELD."""
        if self._columns[tier][row] >= 0:
            return CopyState.LEAVING if row in self._leaving[tier] else CopyState.HELD
        return CopyState.FILLING if row in self._fillings[tier] else CopyState.ABSENT

    def is_on(self, row: int, tier: int) -> bool:
        """Return whether a tier holds a readable copy of a row."""
        return self._columns[tier][row] >= 0

    def place(self, row: int, tier: int) -> Place:
        """Return the place of a row's copy; NOWHERE if there is none. A read needs no lock."""
        return Place(self._columns[tier][row])

    def places(self, tier: int) -> Sequence[int]:
        """Return the place of every row on a tier, to read those of many rows; do not change it."""
        return self._columns[tier]

    # Held copies.

    def hold(self, row: int, tier: int, place: Place) -> Place:
        """Record that a copy is readable at a place; return its former place, NOWHERE if none."""
        column, before = self._columns[tier], self.state(row, tier)
        known, column[row] = Place(column[row]), place
        self._leaving[tier].discard(row)
        self.events.record(row, tier, before, CopyState.HELD)
        return known

    def hold_all(self, tier: int, places: Mapping[int, Place]) -> None:
        """Record that copies of rows are readable at their places; as `hold` for each."""
        if self.events.wanted or self._leaving[tier]:
            for row, place in places.items():
                self.hold(row, tier, place)
            return
        column = self._columns[tier]
        for row, place in places.items():
            column[row] = place

    def remove(self, row: int, tier: int) -> Place:
        """Record that a tier holds no copy of a row; return its place, NOWHERE if it held none."""
        column = self._columns[tier]
        place = Place(column[row])
        if place != NOWHERE:
            if self.events.wanted:
                self.events.record(row, tier, self.state(row, tier), CopyState.ABSENT)
            column[row] = NOWHERE
            self._leaving[tier].discard(row)
        return place

    # Copies that are being made.

    def begin_filling(self, row: int, tier: int) -> Filling:
        """Begin a copy; the caller ends it with `end_filling`, published or not."""
        before, filling = self.state(row, tier), Filling()
        self._fillings[tier][row] = filling
        if before is CopyState.ABSENT:
            self.events.record(row, tier, before, CopyState.FILLING)
        return filling

    def end_filling(self, row: int, tier: int) -> None:
        """End a copy that was begun, and wake those who wait for it."""
        filling = self._fillings[tier].pop(row)
        if not self.is_on(row, tier):
            self.events.record(row, tier, CopyState.FILLING, CopyState.ABSENT)
        filling.over.set()

    def fillings(self, tier: int) -> Mapping[int, Filling]:
        """Return the copies that are being made on a tier, by row."""
        return self._fillings[tier]

    def drop_fillings(self, row: int) -> None:
        """Let no copy of a row that is being made be published."""
        for fillings in self._fillings:
            if (filling := fillings.get(row)) is not None:
                filling.drop()

    # Copies that leave.

    def begin_leaving(self, row: int, tier: int) -> None:
        """Note that a tier has named a held copy as one that it evicts next."""
        if self.state(row, tier) is CopyState.HELD:
            self._leaving[tier].add(row)
            self.events.record(row, tier, CopyState.HELD, CopyState.LEAVING)

    def stay(self, row: int, tier: int) -> None:
        """Note that a copy which was to leave stays."""
        if self.state(row, tier) is CopyState.LEAVING:
            self._leaving[tier].discard(row)
            self.events.record(row, tier, CopyState.LEAVING, CopyState.HELD)

    def leaving(self, tier: int) -> int:
        """Return how many copies leave a tier."""
        return len(self._leaving[tier])
