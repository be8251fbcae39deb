"""Find again what an earlier process left on the tiers, while the store already serves.

A survivor is only a hint: its record is verified when it is read, like every other. Until a block
is found again it is a miss, and may be written anew: that copy stays, and the survivor is freed.
So is what its domain could not open any more. What lies in the clear from before its domain was
sealed is overwritten, where the tier can: no key protects it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterator

from holdfast.blocks.world import World
from holdfast.clock import Clock
from holdfast.store.states import States
from holdfast.tiers.base import NOWHERE, Place, Survivor, Tier, Wiping

_log = logging.getLogger("holdfast.store")


class Recovery:
    """One background pass over the survivors of every tier below the host."""

    def __init__(self, states: States, clock: Clock) -> None:
        self._states = states
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-recover", daemon=True)
        self._adopted = _Adopted()
        self.blocks = 0
        self.seconds: float | None = None

    def start(self) -> None:
        """Begin; the store serves meanwhile."""
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the pass; False if it still runs after `timeout_s`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop early if need be."""
        self._stop.set()
        self.wait()

    def _run(self) -> None:
        started = self._clock.now()
        for number, tier in enumerate(self._states.lower, start=1):
            try:
                self._scan(number, tier)
            except Exception:  # noqa: BLE001  # a tier that cannot be scanned has no survivors
                _log.exception("recovery of tier=%s ended early", tier.name)
            self._adopted = _Adopted()
        self.seconds = self._clock.now() - started
        if self.blocks:
            _log.info("recovered blocks=%d seconds=%.3f", self.blocks, self.seconds)

    def _scan(self, number: int, tier: Tier) -> None:
        """Adopt one by one: only what a tier hands over at the moment is kept from being reused."""
        for survivor in self._not_in_the_clear(tier):
            if self._stop.is_set():
                return
            self._adopt(number, survivor)

    def _not_in_the_clear(self, tier: Tier) -> Iterator[Survivor]:
        for survivor in tier.survivors():
            if not self._states.sealing.disowns(survivor.header):
                yield survivor
                continue
            if self._stop.is_set():
                return
            if isinstance(tier, Wiping):
                tier.wipe(survivor)
            tier.free([survivor.place])

    def _adopt(self, number: int, survivor: Survivor) -> None:
        states, (header, place) = self._states, survivor
        with states.lock:
            if not states.sealing.may_open(header):
                states.lower[number - 1].free([place])
                return
            world = World(header.fingerprint, header.domain, header.payload_bytes, header.tokens)
            row = states.index.add(world, header.key, header.parent, header.depth)
            known = Place(states.index.places[number][row])
            if known == place:
                return  # it was written since: what is known of it is no older
            if known != NOWHERE:
                if not self._adopted.says(row, header.key, known):
                    states.lower[number - 1].free([place])  # what was written since is younger
                    return
                states.vacate(row, number)
                row = states.index.add(world, header.key, header.parent, header.depth)
            states.publish_below(row, number, place)
            self._adopted.note(row, header.key, place)
            self.blocks += 1


class _Adopted:
    """Which places in the index are those of survivors of this tier: 8 bytes a row."""

    def __init__(self) -> None:
        self._marks = array("q")

    def note(self, row: int, key: bytes, place: Place) -> None:
        """Note that a row has the place of a survivor."""
        if row >= len(self._marks):
            self._marks.extend([0] * (row + 1 - len(self._marks)))
        self._marks[row] = hash((key, place))

    def says(self, row: int, key: bytes, place: Place) -> bool:
        """Return whether it is the survivor's place yet; rows and places are used again."""
        return row < len(self._marks) and self._marks[row] == hash((key, place))
