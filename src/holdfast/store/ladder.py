"""The only code that moves blocks between tiers: up on a fetch, down behind a save.

Decide under the lock, move bytes without it, publish under it again. Bytes that move up land in a
host slot and are verified before anybody is told of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.clock import Clock
from holdfast.codec.pack import verify
from holdfast.errors import Outcome
from holdfast.plan.planner import Speed
from holdfast.store.states import HOST, States
from holdfast.tiers.base import NOWHERE, Get, Place, Put

WAVE_BLOCKS = 8
"""Blocks that climb together: enough to fill the device's queue, few enough to overlap."""

BATCH_BLOCKS = 32
"""Blocks that go down together."""

_WAIT_S = 0.5


class Climb(NamedTuple):
    """One block on its way up: its row and key, where it lies, and the host slot waiting for it."""

    row: int
    key: bytes
    tier: int
    source: Place
    slot: Place


class Ladder:
    """Moves blocks of one store up and down. Owns the threads that do it."""

    def __init__(self, states: States, clock: Clock) -> None:
        self._states = states
        self._clock = clock
        self._climbers = ThreadPoolExecutor(2, thread_name_prefix="holdfast-climb")
        self._work = threading.Condition()
        self._closing = False
        self.speeds = [Speed(0.0, 6e9)] + [Speed(2e-4, 1e9) for _ in states.lower]
        self._writer = threading.Thread(
            target=self._write_behind, name="holdfast-writer", daemon=True
        )

    def start(self) -> None:
        """Start writing behind saves."""
        self._writer.start()

    def claim(self, world: World, rows: Sequence[int]) -> list[Climb]:
        """Find host slots for pinned rows not on the host; call under the lock.

        Stops at the first row without a slot: what lies behind a hole is of no use.
        """
        states, climbs = self._states, []
        for row in rows:
            if states.index.places[HOST][row] >= 0 or row in states.loading:
                continue
            tier = states.index.fastest(row)
            key = states.index.keys[row]
            slot = states.make_room(world) if tier > HOST else NOWHERE
            if slot == NOWHERE or key is None:
                break
            states.loading[row] = threading.Event()
            source = Place(states.index.places[tier][row])
            climbs.append(Climb(row, key, tier, source, slot))
        states.pin([climb.row for climb in climbs])
        return climbs

    def climb(self, world: World, climbs: Sequence[Climb]) -> list[Future[None]]:
        """Start reading claimed blocks into their slots, in waves that follow chain order."""
        waves = [climbs[i : i + WAVE_BLOCKS] for i in range(0, len(climbs), WAVE_BLOCKS)]
        return [self._climbers.submit(self._climb, world, wave) for wave in waves]

    def wake(self) -> None:
        """Tell the writer that there are blocks to write."""
        with self._work:
            self._work.notify()

    def close(self) -> None:
        """Write what waits to be written, then stop."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._writer.is_alive():
            self._writer.join()
        self._climbers.shutdown(wait=True)

    def _climb(self, world: World, wave: Sequence[Climb]) -> None:
        outcomes = [Outcome.GONE] * len(wave)
        try:
            for tier in {climb.tier for climb in wave}:
                self._read(world, tier, wave, outcomes)
        finally:
            self._land(world, wave, outcomes)

    def _read(
        self, world: World, tier: int, wave: Sequence[Climb], outcomes: list[Outcome]
    ) -> None:
        """Read and verify those blocks of a wave that lie on `tier`."""
        host, size = self._states.host(world), world.record_bytes
        picked = [i for i, climb in enumerate(wave) if climb.tier == tier]
        batch = [Get(wave[i].source, wave[i].key, host.view(wave[i].slot, size)) for i in picked]
        started = self._clock.now()
        found = self._states.lower[tier - 1].read(batch)
        self._note_speed(tier, len(batch) * size, self._clock.now() - started)
        for i, get, outcome in zip(picked, batch, found, strict=True):
            outcomes[i] = (
                verify(get.into, get.key, world.fingerprint, world.payload_bytes)
                if outcome is Outcome.OK
                else outcome
            )

    def _land(self, world: World, wave: Sequence[Climb], outcomes: Sequence[Outcome]) -> None:
        states = self._states
        with states.lock:
            landed = []
            for climb, outcome in zip(wave, outcomes, strict=True):
                if outcome is Outcome.OK and states.index.keys[climb.row] == climb.key:
                    states.publish(climb.row, HOST, climb.slot)
                    landed.append(climb.row)
                else:
                    states.host(world).free([climb.slot])
                    if states.index.places[climb.tier][climb.row] == climb.source:
                        states.quarantine(climb.row, climb.tier, outcome)
            states.enter_host(landed)
            for climb in wave:
                states.loading.pop(climb.row).set()
            states.unpin([climb.row for climb in wave])

    def _note_speed(self, tier: int, nbytes: int, seconds: float) -> None:
        old = self.speeds[tier]
        seen = nbytes / max(seconds - old.latency_s, 1e-6)
        self.speeds[tier] = old._replace(bytes_per_s=0.8 * old.bytes_per_s + 0.2 * seen)

    def _write_behind(self) -> None:
        while True:
            with self._work:
                if not self._states.dirty:
                    if self._closing:
                        return
                    self._work.wait(_WAIT_S)
            self._prefault()
            while self._states.dirty:
                if not self._write_batch():
                    break

    def _prefault(self) -> None:
        for host in list(self._states.hosts.values()):
            host.prefault()

    def _write_batch(self) -> bool:
        """Write up to one batch of dirty blocks of equal size to the first lower tier."""
        states, lower = self._states, self._states.lower[0]
        with states.lock:
            rows = self._pick_dirty()
            sizes = [states.index.world(row).record_bytes for row in rows]
            reserved = lower.reserve(sizes)
            for dropped in reserved.dropped:
                states.forget(dropped.key, 1, dropped.place)
            puts, kept = [], []
            for row, size, place in zip(rows, sizes, reserved.places, strict=True):
                if place == NOWHERE:
                    states.unwanted.add(row)
                    continue
                slot = Place(states.index.places[HOST][row])
                puts.append(Put(place, states.host(states.index.world(row)).view(slot, size)))
                kept.append(row)
            states.pin(kept)
            states.writing = len(kept)
        outcomes = lower.write(puts)
        with states.lock:
            states.writing = 0
            for row, put, outcome in zip(kept, puts, outcomes, strict=True):
                if outcome is Outcome.OK:
                    states.publish(row, 1, put.place)
                else:
                    states.unwanted.add(row)
            states.unpin(kept)
        return bool(rows)

    def _pick_dirty(self) -> list[int]:
        states = self._states
        rows: list[int] = []
        while states.dirty and len(rows) < BATCH_BLOCKS:
            row = states.index.find(states.dirty.popitem(last=False)[0])
            if row >= 0 and states.index.places[HOST][row] >= 0 and not states.saved_below(row):
                rows.append(row)
        return rows
