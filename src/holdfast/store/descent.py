"""Down the ladder: write blocks to one tier below the host, behind their saves.

Decide under the lock, move bytes without it, publish under it again. Each tier has a line of its
own and a thread of its own, so that a slow pool never holds up the disk.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from holdfast.blocks.envelope import read_header
from holdfast.errors import Outcome
from holdfast.failpoints import reach
from holdfast.store.states import HOST, States
from holdfast.tiers.base import NOWHERE, Place, Put, Shared, segment_place

BATCH_BLOCKS = 32
"""Blocks that go down together."""

_LOOK_AGAIN_S = 0.5


class _Batch(NamedTuple):
    rows: list[int]
    puts: list[Put]


class Descent:
    """Writes what waits for lower tier `number` (1 is the first below the host)."""

    def __init__(self, states: States, number: int) -> None:
        self._states = states
        self._number = number
        self._tier = states.lower[number - 1]
        self._work = threading.Condition()
        self._closing = False
        name = f"holdfast-to-{self._tier.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def wake(self) -> None:
        """Say that a block waits."""
        with self._work:
            self._work.notify()

    def close(self) -> None:
        """Write what waits, then stop."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        waiting = self._states.waiting[self._number - 1]
        while True:
            with self._work:
                if not waiting:
                    if self._closing:
                        return
                    self._work.wait(_LOOK_AGAIN_S)
            for host in list(self._states.hosts.values()):
                host.prefault()
            while waiting:
                self._write()

    def _write(self) -> None:
        states = self._states
        with states.lock:
            batch = self._pick()
            states.pin(batch.rows)
            states.writing[self._number - 1] = len(batch.rows)
        outcomes = self._tier.write(batch.puts) if batch.puts else []
        reach("descent_written")
        with states.lock:
            states.writing[self._number - 1] = 0
            for row, put, outcome in zip(batch.rows, batch.puts, outcomes, strict=True):
                if outcome is Outcome.OK:
                    states.publish(row, self._number, put.place)
                else:
                    states.unwanted.add(row)
            states.unpin(batch.rows)

    def _pick(self) -> _Batch:
        """Take blocks off the line and find places for them; call under the lock."""
        states, number = self._states, self._number
        waiting, column = states.waiting[number - 1], states.index.places[number]
        rows: list[int] = []
        while waiting and len(rows) < BATCH_BLOCKS:
            row = states.index.find(waiting.popitem(last=False)[0])
            if row >= 0 and states.index.places[HOST][row] >= 0 and column[row] == NOWHERE:
                rows.append(row)
        records = [self._record(row) for row in rows]
        batch = _Batch([], [])
        for row, record, place in zip(rows, records, self._places(records), strict=True):
            if place == NOWHERE:
                states.unwanted.add(row)
                continue
            batch.rows.append(row)
            batch.puts.append(Put(place, record))
        return batch

    def _record(self, row: int) -> memoryview:
        world = self._states.index.world(row)
        slot = Place(self._states.index.places[HOST][row])
        return self._states.host(world).view(slot, world.record_bytes)

    def _places(self, records: list[memoryview]) -> list[Place]:
        if isinstance(self._tier, Shared):
            return [segment_place(read_header(record)[0].segment) for record in records]
        reserved = self._tier.reserve([len(record) for record in records])
        for dropped in reserved.dropped:
            self._states.forget(dropped.key, self._number, dropped.place)
        return reserved.places
