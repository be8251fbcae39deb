"""The only code that moves blocks between tiers: up on a fetch, down behind a save.

Decide under the lock, move bytes without it, publish under it again. Bytes that move up land in a
host slot and are verified before anybody is told of them. The way down is `store/descent.py`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from holdfast.blocks.world import World
from holdfast.errors import Outcome
from holdfast.failpoints import reach
from holdfast.limits import MIB
from holdfast.policy.turns import Errand, Turn
from holdfast.store.descent import Descent
from holdfast.store.fair_threads import FairThreads
from holdfast.store.judgement import Judgement
from holdfast.store.promises import Loading
from holdfast.store.rewrite import rewrite_strays
from holdfast.store.room import make_rooms
from holdfast.store.states import HOST, States
from holdfast.tiers.base import Get, Place, Shared

WAVE_BYTES = 8 * MIB
"""Blocks that climb together make this up: few system calls, and soon one to verify or to open."""

WAVE_S = 0.00125
"""Where other domains read as well a wave takes no longer than this, if that is a block at least:
what is under way of one is what another waits for, whatever its turn."""

WAVES_AT_ONCE = 4
"""Per tier: the others fill the device's queue while one is verified or opened. A domain that has
none may begin a fifth."""


_log = logging.getLogger("holdfast.store")


class Climb(NamedTuple):
    """One block on its way up: its row and key, where it lies, and the host slot waiting for it.

    `era` is that of its domain when it set out.
    """

    row: int
    key: bytes
    tier: int
    source: Place
    slot: Place
    era: int


class Wave(NamedTuple):
    """Blocks of one tier that climb together, and the reading of them."""

    world: World
    tier: int
    climbs: Sequence[Climb]
    reading: Future[None]

    @property
    def nbytes(self) -> int:
        """What is read for it."""
        return len(self.climbs) * self.world.record_bytes


class Ladder:
    """Moves blocks of one store up and down. Owns the threads that do it."""

    def __init__(self, states: States, judgement: Judgement) -> None:
        self._states = states
        self._judgement = judgement
        self._climbers = [
            FairThreads(WAVES_AT_ONCE, 1, f"holdfast-from-{tier.name}") for tier in states.lower
        ]
        judgement.credit = self._credit
        self._descents = [Descent(states, number + 1) for number in range(len(states.lower))]
        self._ahead: dict[int, Wave] = {}
        """By row, what nobody waits for yet; under the store's lock."""

    def start(self) -> None:
        """Start writing behind saves."""
        for descent in self._descents:
            descent.start()

    def claim(self, world: World, rows: Sequence[int]) -> list[Climb]:
        """Find host slots for pinned rows not on the host; call under the lock.

        Stops at the first row without a slot: what lies behind a hole is of no use.
        """
        states, index = self._states, self._states.index
        if states.sealing.is_away(world.domain):
            return []
        below: list[tuple[int, bytes, int]] = []
        for row in dict.fromkeys(rows):  # a chain may name a block twice
            if index.places[HOST][row] >= 0 or row in states.loading:
                continue
            key, tier = index.keys[row], index.fastest(row)
            if key is None or tier <= HOST:
                break
            below.append((row, key, tier))
        era, climbs = states.era(world.domain), list[Climb]()
        slots = make_rooms(states, world, len(below))
        for (row, key, tier), slot in zip(below, slots, strict=False):
            states.loading[row] = Loading()
            climbs.append(Climb(row, key, tier, Place(index.places[tier][row]), slot, era))
        states.pin([climb.row for climb in climbs])
        return climbs

    def climb(
        self, world: World, climbs: Sequence[Climb], errand: Errand = Errand.DEMAND
    ) -> list[Wave]:
        """Start reading claimed blocks into their slots, in waves that follow chain order.

        Each tier is read for the domains by turns, by the bytes that each asks for.
        """
        domain, share = world.domain, self._states.fill.share(world.domain)
        started: list[Wave] = []
        for tier, group in itertools.groupby(climbs, key=lambda climb: climb.tier):
            run, blocks = list(group), self._wave_blocks(world, tier)
            for at in range(0, len(run), blocks):
                wave = run[at : at + blocks]
                nbytes = len(wave) * world.record_bytes
                self._judgement.asked(tier, nbytes, domain)
                work = partial(self._climb, world, tier, wave)
                turn = Turn(domain, nbytes, share, errand)
                try:
                    reading = self._climbers[tier - 1].submit(turn, work)
                except RuntimeError:  # closed meanwhile: what lies below is a miss
                    self._judgement.dropped(tier, nbytes, domain)
                    with self._states.lock:
                        self._take_back(world, wave)
                    continue
                started.append(Wave(world, tier, wave, reading))
                if errand is Errand.AHEAD:
                    self._note_ahead(started[-1])
        return started

    def hurry(self, rows: Iterable[int]) -> None:
        """Have waves that are for later, of rows needed now, read in turn; under the lock.

        They would be read behind what everybody else waits for.
        """
        for wave in self._for_later(rows):
            turn = Turn(wave.world.domain, errand=Errand.AHEAD)
            self._climbers[wave.tier - 1].hurry(turn, wave.reading)
            for climb in wave.climbs:
                self._ahead.pop(climb.row, None)

    def give_up(self) -> None:
        """Take back what is for later and not begun: nobody will want it."""
        with self._states.lock:
            waves = self._for_later(list(self._ahead))
        self.cancel(waves)

    def cancel(self, waves: Sequence[Wave]) -> None:
        """Take waves back that nobody has begun to read or else waits for; the others land."""
        for wave in waves:
            with self._states.lock:  # or somebody would begin to wait for it now
                over = wave.reading.done()  # taken back before, too: its slots are others' by now
                taken = not (over or self._is_awaited(wave)) and wave.reading.cancel()
                if taken:
                    self._take_back(wave.world, wave.climbs)
            if taken:
                self._judgement.dropped(wave.tier, wave.nbytes, wave.world.domain)

    def wake(self) -> None:
        """Tell the writers that there are blocks to write."""
        for descent in self._descents:
            descent.wake()

    def close(self) -> None:
        """Write what waits to be written, then stop."""
        for descent in self._descents:
            descent.close()
        for climbers in self._climbers:
            climbers.shutdown()

    def _wave_blocks(self, world: World, tier: int) -> int:
        """Return how many blocks climb together."""
        size, blocks = world.record_bytes, math.ceil(WAVE_BYTES / world.record_bytes)
        if self._climbers[tier - 1].shared(world.domain):
            blocks = int(min(blocks, WAVE_S * self._judgement.speed(tier) / size))
        return max(1, blocks)

    def _credit(self, tier: int, domain: bytes) -> float:
        """Return how many bytes of a tier a domain would be read before others."""
        if tier == HOST:
            return 0.0
        return self._climbers[tier - 1].credit(Turn(domain, share=self._states.fill.share(domain)))

    def _note_ahead(self, wave: Wave) -> None:
        with self._states.lock:
            loading = self._states.loading
            if not wave.reading.done():
                self._ahead.update({c.row: wave for c in wave.climbs if c.row in loading})

    def _for_later(self, rows: Iterable[int]) -> list[Wave]:
        ahead = self._ahead
        return list({id(ahead[row]): ahead[row] for row in rows if row in ahead}.values())

    def _is_awaited(self, wave: Wave) -> bool:
        """Whether anybody but who claimed them waits for blocks of a wave; under the lock."""
        loading = self._states.loading
        return any(loading[climb.row].waiting for climb in wave.climbs if climb.row in loading)

    def _take_back(self, world: World, climbs: Sequence[Climb]) -> None:
        """Give slots back that nobody has begun to fill; under the lock."""
        self._states.give_back(world, [climb.slot for climb in climbs])
        self._settle(climbs)

    def _climb(self, world: World, tier: int, wave: Sequence[Climb]) -> None:
        """Read one wave from one tier into its slots, open and verify it, land it."""
        states, lower = self._states, self._states.lower[tier - 1]
        host, size = states.host(world), world.record_bytes
        bad: list[Get] = []
        outcomes = [Outcome.GONE] * len(wave)
        batch = [Get(climb.source, climb.key, host.view(climb.slot, size), world) for climb in wave]
        try:
            found = lower.read(batch)
            reach("climb_read")
            outcomes = [
                states.sealing.land(get.into, get.key, world) if outcome is Outcome.OK else outcome
                for get, outcome in zip(batch, found, strict=True)
            ]
            came = zip(batch, found, outcomes, strict=True)
            # Only who has the key can tell: the tier is told what it served that did not verify.
            bad = [get for get, was, now in came if was is Outcome.OK and now is not was]
        except Exception:  # noqa: BLE001  # a tier may be anybody's; nobody's request fails for it
            _log.exception("reading failed tier=%s", lower.name)
            outcomes = [Outcome.GONE] * len(wave)
        finally:
            arrived = outcomes.count(Outcome.OK) * size
            self._judgement.arrived(tier, arrived, world.domain, of=len(wave) * size)
            promoted = self._land(world, wave, outcomes)
        if bad and isinstance(lower, Shared) and not states.sealing.is_away(world.domain):
            lower.condemn(bad)
        good = [get.key for get, o in zip(batch, outcomes, strict=True) if o is Outcome.OK]
        if rewrite_strays(states, tier, good, size) or promoted:
            self.wake()

    def _land(self, world: World, wave: Sequence[Climb], outcomes: Sequence[Outcome]) -> bool:
        """Publish what came; return whether some of it now waits for a tier that it passed by."""
        states, promoted = self._states, False
        with states.lock:
            landed, away = dict[int, Place](), states.sealing.is_away(world.domain)
            for climb, outcome in zip(wave, outcomes, strict=True):
                known = states.index.keys[climb.row] == climb.key
                known = known and states.era(world.domain) == climb.era and not away
                if outcome is Outcome.OK and known:
                    landed[climb.row] = climb.slot
                    promoted |= states.came_up(climb.row, climb.tier)
                else:
                    states.give_back(world, [climb.slot])
                    if states.index.places[climb.tier][climb.row] == climb.source and not away:
                        states.quarantine(climb.row, climb.tier, outcome)
            try:
                states.publish_here(world, landed)
                states.enter_host(list(landed))
            finally:
                self._settle(wave)
        return promoted

    def _settle(self, climbs: Sequence[Climb]) -> None:
        """Tell whoever waits for these that no more is coming; call under the lock."""
        for climb in climbs:
            self._ahead.pop(climb.row, None)
            self._states.loading.pop(climb.row).over.set()
        self._states.unpin([climb.row for climb in climbs])
