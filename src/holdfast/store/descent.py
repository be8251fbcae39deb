"""Down the ladder: write blocks to one tier below the host, behind their saves.

Decide under the lock, move bytes without it, publish under it again. Each tier has a line of its
own and a thread of its own, so that a slow pool never holds up the disk. Blocks of a sealed domain
are sealed into staging memory on the way, group by group and a few groups at once: the cipher lets
go of the interpreter, so some are sealed while others are written.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from holdfast.blocks.envelope import read_header
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import verify
from holdfast.codec.seal import Sealer
from holdfast.errors import FormatError, Outcome
from holdfast.failpoints import reach
from holdfast.limits import MIB
from holdfast.store.rewrite import put_off, put_off_row
from holdfast.store.room import make_room_below
from holdfast.store.states import HOST, States
from holdfast.tiers.base import NOWHERE, Asked, Place, Put, Shared, is_away, segment_place
from holdfast.workers import workers

BATCH_BLOCKS = 32
"""Blocks that go down together."""


class Abreast(NamedTuple):
    """How a batch is sealed: so many groups at once, each whole once it has enough bytes.

    Those are what makes two for each thread of the batch, within these bounds. Of the groups,
    `sealed_at_once` are being sealed and the others written.
    """

    groups: int
    sealed_at_once: int
    group_bytes_min: int
    group_bytes_max: int

    def group_bytes(self, batch_bytes: int) -> int:
        """Return what makes a group of a batch whole."""
        halves = batch_bytes // (2 * self.groups)
        return min(max(halves, self.group_bytes_min), self.group_bytes_max)


NEAR = Abreast(8, max(1, len(os.sched_getaffinity(0)) // 2), MIB, 4 * MIB)
"""Were all to be sealed first, a device would have nothing to do, and then everything at once: they
take turns, so that the first write begins soon and some is always under way."""

FAR = Abreast(2, 2, 16 * MIB, 16 * MIB)
"""Every message to a shared tier costs a round trip."""

_LOOK_AGAIN_S = 0.5

_log = logging.getLogger("holdfast.store")


class _Load(NamedTuple):
    """One block on its way down, from its slot. `era` is that of its domain when it set out."""

    row: int
    slot: int
    put: Put
    domain: bytes
    era: int


class _Sealed(NamedTuple):
    """A block on its way down, and what seals it; OK if it goes as it lies, else why it can not."""

    load: _Load
    sealer: Sealer | Outcome


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
        self._abreast = FAR if isinstance(self._tier, Shared) else NEAR
        self._sealers: ThreadPoolExecutor | None = None
        self._turns = threading.BoundedSemaphore(self._abreast.sealed_at_once)
        self._stages = [aligned_buffer(0) for _ in range(self._abreast.groups)]

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
        if self._sealers:
            self._sealers.shutdown()

    def _run(self) -> None:
        waiting = self._states.waiting[self._number - 1]
        while True:
            with self._work:
                if not waiting:
                    if self._closing:
                        return
                    self._work.wait(_LOOK_AGAIN_S)
            while waiting:
                try:
                    if is_away(self._tier):
                        put_off(self._states, self._number)
                        break
                    self._write()
                except Exception:  # noqa: BLE001  # without this thread nothing would leave memory
                    _log.exception("blocks can not be written tier=%s", self._tier.name)

    def _write(self) -> None:
        states, number = self._states, self._number
        with states.lock:
            batch = self._pick()
            rows = [load.row for load in batch]
            states.pin(rows)
            states.writing[number - 1] = len(rows)
        try:
            outcomes = self._send(batch)
        except Exception:  # noqa: BLE001  # a tier may be anybody's
            _log.exception("writing failed tier=%s", self._tier.name)
            outcomes = [Outcome.GONE] * len(batch)
            self._tier.free([load.put.place for load in batch])
        reach("descent_written")
        damaged, away = self._damaged(batch, outcomes), is_away(self._tier)
        with states.lock:
            states.writing[number - 1] = 0
            for load, outcome in zip(batch, outcomes, strict=True):
                if not self._still(load):
                    self._tier.free([load.put.place])
                elif outcome is Outcome.OK:
                    states.publish_below(load.row, number, load.put.place)
                elif load.row in damaged:
                    states.quarantine(load.row, HOST, Outcome.CORRUPT)
                elif away:
                    put_off_row(states, number, load.row)
                else:
                    states.unwanted.add(load.row)
            states.unpin(rows)

    def _damaged(self, batch: Sequence[_Load], outcomes: Sequence[Outcome]) -> set[int]:
        """Return the rows whose copy in memory is to blame for a write that was refused.

        They would pass for held until somebody reads them, and could not be saved again.
        """
        damaged = set()
        for load, outcome in zip(batch, outcomes, strict=True):
            if outcome is Outcome.CORRUPT:
                world, record = self._states.index.world(load.row), load.put.record
                key = self._states.index.keys[load.row] or b""
                whole = verify(record, key, world.fingerprint, world.payload_bytes)
                if world.domain in self._states.hosts and whole is not Outcome.OK:
                    damaged.add(load.row)
        return damaged

    def _still(self, load: _Load) -> bool:
        """Whether a block is yet what was written: not dropped, erased or found bad meanwhile."""
        states = self._states
        here = states.index.places[HOST][load.row] == load.slot
        return here and load.era == states.era(load.domain)

    def _send(self, batch: Sequence[_Load]) -> list[Outcome]:
        """Write what of a batch is not where it is to go already."""
        known = [False] * len(batch)
        if batch and isinstance(self._tier, Asked):
            known = self._tier.known([load.put for load in batch])
        new = [load for load, there in zip(batch, known, strict=True) if not there]
        written = iter(self._send_new(new) if new else ())
        return [Outcome.OK if there else next(written) for there in known]

    def _send_new(self, batch: Sequence[_Load]) -> list[Outcome]:
        """Write a batch: as it lies where nothing is sealed, else a few groups at once."""
        sealing = self._states.sealing
        if not any(sealing.seals(load.domain) for load in batch):
            return self._tier.write([load.put for load in batch])
        if self._sealers is None:
            self._sealers = workers(self._abreast.groups, f"{self._thread.name}-sealed")
        nbytes = sum(len(load.put.record) for load in batch)
        sealed = [_Sealed(load, self._sealer(load)) for load in batch]
        groups = _groups(sealed, self._abreast.group_bytes(nbytes))
        sent = [self._sealers.submit(self._send_sealed, group) for group in groups]
        wait(sent)  # nobody may be reading a slot when it is somebody else's
        return [outcome for each in sent for outcome in each.result()]

    def _sealer(self, load: _Load) -> Sealer | Outcome:
        """Return what seals a block, why it can not be, or OK if it goes down as it lies."""
        sealing = self._states.sealing
        if not sealing.seals(load.domain):
            return Outcome.OK
        return sealing.sealer(load.put.record, load.domain)

    def _send_sealed(self, group: Sequence[_Sealed]) -> list[Outcome]:
        """Seal a group and write it. There is a stage for each thread."""
        size = sum(len(one.load.put.record) for one in group)
        stage = self._stages.pop()
        try:
            if len(stage) < size:
                stage = aligned_buffer(size)
            with self._turns:
                sealed = self._seal(group, stage)
            return self._write_sealed(*sealed)
        finally:
            self._stages.append(stage)

    def _seal(
        self, group: Sequence[_Sealed], memory: memoryview
    ) -> tuple[list[Put], list[Outcome]]:
        """Return what to write of a group, and for each block whether it could be sealed."""
        puts, outcomes = [], []
        for load, sealer in group:
            put = load.put
            if isinstance(sealer, Outcome):
                outcome = sealer
            else:
                twin, memory = memory[: len(put.record)], memory[len(put.record) :]
                outcome = sealer.seal(put.record, twin)
                if load.era != self._states.era(load.domain):
                    outcome = Outcome.GONE
                put = Put(put.place, twin)
            puts.append(put)
            outcomes.append(outcome)
        return puts, outcomes

    def _write_sealed(self, puts: Sequence[Put], sealed: Sequence[Outcome]) -> list[Outcome]:
        """Write what could be sealed; the places of the rest are free again."""
        pairs = list(zip(puts, sealed, strict=True))
        self._tier.free([put.place for put, outcome in pairs if outcome is not Outcome.OK])
        written = iter(self._tier.write([put for put, outcome in pairs if outcome is Outcome.OK]))
        return [next(written) if outcome is Outcome.OK else outcome for outcome in sealed]

    def _pick(self) -> list[_Load]:
        """Take blocks off the line and find places for them; call under the lock."""
        states, number = self._states, self._number
        waiting, column = states.waiting[number - 1], states.index.places[number]
        rows: list[int] = []
        while waiting and len(rows) < BATCH_BLOCKS:
            row = states.index.find(waiting.popitem(last=False)[0])
            here = row >= 0 and states.index.places[HOST][row] >= 0
            if here and column[row] == NOWHERE and self._is_record(row):
                rows.append(row)
        rows = self._within_quotas(rows)
        records = [self._record(row) for row in rows]
        batch: list[_Load] = []
        for row, record, place in zip(rows, records, self._places(records), strict=True):
            if place == NOWHERE:
                states.unwanted.add(row)
                continue
            domain, slot = states.index.world(row).domain, states.index.places[HOST][row]
            batch.append(_Load(row, slot, Put(place, record), domain, states.era(domain)))
        return batch

    def _is_record(self, row: int) -> bool:
        """Whether a block's slot holds a record yet: if its header is damaged, the block goes."""
        try:
            read_header(self._record(row))
        except FormatError:
            self._states.quarantine(row, HOST, Outcome.CORRUPT)
            return False
        return True

    def _within_quotas(self, rows: Sequence[int]) -> list[int]:
        """Make room for blocks in their domains' quotas on this tier; leave out what never fits."""
        states, coming, within = self._states, Counter[bytes](), list[int]()
        for row in rows:
            world = states.index.world(row)
            nbytes = coming[world.domain] + world.record_bytes
            if make_room_below(states, world, self._number, nbytes):
                coming[world.domain] = nbytes
                within.append(row)
            else:
                states.unwanted.add(row)
        return within

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


def _groups(batch: Sequence[_Sealed], most: int) -> Iterator[list[_Sealed]]:
    """Cut a batch into groups, each whole with the record that makes it so many bytes."""
    group: list[_Sealed] = []
    nbytes = 0
    for one in batch:
        group.append(one)
        nbytes += len(one.load.put.record)
        if nbytes >= most:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
