"""Scrub: read and verify stored copies, at a pace, and forget what fails.

A store that reads only what is asked for learns of rot when it matters. So everything is read now
and then: on demand (`holdfast verify`), and in the background, slowly and behind everything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.blocks.world import World
from holdfast.buffers import aligned_buffer
from holdfast.codec.pack import verify
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.store.core import Core
from holdfast.store.inspect import EVERYTHING as EVERY_FINGERPRINT
from holdfast.store.states import HOST, States
from holdfast.tiers.base import Get, Place, Shared

_RATE_MIN = MIB
_HASTE = 0.8
"""A pass is paced to be over in this share of its time."""

_ROWS_AT_ONCE = 4_096
_NICE = 15
_YIELD_S = 0.02
_YIELDS_MAX = 50

_log = logging.getLogger("holdfast.store")


class Wish(NamedTuple):
    """What to scrub: one fingerprint (hex) or all, rows from `start` on, for about `seconds`.

    `rate` is in bytes a second, 0 for as fast as it goes. `shared`: tiers of other stores too.
    """

    fingerprint: str = ""
    start: int = 0
    seconds: float = float("inf")
    rate: int = 0
    shared: bool = True


EVERYTHING = Wish()
"""All of it, at once."""


def scrub(store: Core, wish: Wish, stop: threading.Event | None = None) -> dict[str, Any]:
    """Read and verify stored copies; un-index what fails. Serving goes on meanwhile.

    `next` is where to go on, -1 at the end; `owes_s`: how long to wait before, to keep to the rate.
    """
    stop = stop or threading.Event()
    begun, nbytes, checked, following = store.clock.now(), 0, 0, -1
    bad: list[dict[str, str]] = []
    for row in _rows(store.states, wish):
        spent = store.clock.now() - begun
        if wish.rate and nbytes / wish.rate > spent:
            stop.wait(min(nbytes / wish.rate, wish.seconds) - spent)
            spent = store.clock.now() - begun
        if stop.is_set() or (spent >= wish.seconds and row > wish.start):
            following = row
            break
        for tier in range(1 + len(store.states.lower)):
            if tier and not wish.shared and isinstance(store.states.lower[tier - 1], Shared):
                continue
            outcome, size = _verify_copy(store, row, tier)
            if outcome is not Outcome.MISS:
                checked, nbytes = checked + 1, nbytes + size
            if outcome not in (Outcome.OK, Outcome.MISS):
                bad.append({"tier": store.states.tier_name(tier), "outcome": str(outcome)})
    took = nbytes / wish.rate if wish.rate else 0.0
    owes_s = max(0.0, took - (store.clock.now() - begun))
    return {"checked": checked, "bytes": nbytes, "bad": bad, "next": following, "owes_s": owes_s}


class Scrubber:
    """The background scrub of a store: one pass in `every_s`, at most `rate` bytes a second.

    `every_s` 0: none, and so it is until somebody sets it. `rate` 0: as fast as that takes.
    """

    def __init__(self, store: Core) -> None:
        self.every_s = 0.0
        self.rate = 0
        self.passes = self.checked = self.checked_bytes = self.corrupt = 0
        self._store = store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-scrub", daemon=True)

    def start(self) -> None:
        """Begin, once recovery is over."""
        if self.every_s:
            self._thread.start()

    def close(self) -> None:
        """Stop where it is."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def status(self) -> dict[str, int]:
        """Return what was read since start, and how much of it was corrupt."""
        return {
            "passes": self.passes,
            "checked": self.checked,
            "bytes": self.checked_bytes,
            "corrupt": self.corrupt,
        }

    def pace(self) -> int:
        """Return the bytes a second with which one pass is over well in time."""
        lower = [tier for tier in self._store.states.lower if not isinstance(tier, Shared)]
        with self._store.states.lock:
            tiers = [*self._store.states.all_hosts(), *lower]
            held = sum(tier.usage().used_bytes for tier in tiers)
        needed = max(_RATE_MIN, int(held / (_HASTE * self.every_s)))
        return min(self.rate, needed) if self.rate else needed

    def go_over(self) -> None:
        """Make one pass, or the rest of it until `close`."""
        start = 0
        while start >= 0 and not self._stop.is_set():
            self._make_way()
            wish = Wish("", start, 1.0, self.pace(), shared=False)
            found = scrub(self._store, wish, self._stop)
            start = found["next"]
            self.checked += found["checked"]
            self.checked_bytes += found["bytes"]
            self.corrupt += len(found["bad"])
            if found["bad"]:
                _log.warning("scrub found and dropped copies=%d", len(found["bad"]))
            if start >= 0:
                self._stop.wait(found["owes_s"])
        self.passes += start < 0

    def _make_way(self) -> None:
        """Let fetches go first, up to a limit."""
        for _ in range(_YIELDS_MAX):
            if not self._store.states.loading or self._stop.wait(_YIELD_S):
                return

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # Linux: the niceness of one thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._store.recovery.wait()
        while not self._stop.is_set():
            begun = self._store.clock.now()
            try:
                self.go_over()
            except Exception:  # noqa: BLE001  # without this thread nobody would look for rot
                _log.exception("a scrub ended early; the next one begins in time")
            self._stop.wait(max(1.0, begun + self.every_s - self._store.clock.now()))


def _rows(states: States, wish: Wish) -> Iterator[int]:
    """Yield the rows wished for, in order; locks for moments, however many there are."""
    index, at = states.index, max(0, wish.start)
    while True:
        with states.lock:
            stretch = range(at, min(at + _ROWS_AT_ONCE, len(index.keys)))
            rows = [
                row
                for row in stretch
                if index.keys[row] is not None
                and wish.fingerprint in ("", EVERY_FINGERPRINT, index.world(row).fingerprint.hex())
            ]
        yield from rows
        at = stretch.stop
        if not stretch:
            return


def _verify_copy(store: Core, row: int, tier: int) -> tuple[Outcome, int]:
    """Verify one copy; return what it is (MISS where there is none) and the bytes read."""
    states = store.states
    with states.lock:
        key, place = states.index.keys[row], Place(states.index.places[tier][row])
        if key is None or place < 0:
            return Outcome.MISS, 0
        world = states.index.world(row)
        if states.sealing.is_away(world.domain):
            return Outcome.MISS, 0
        states.pin([row])
    outcome = Outcome.OK
    try:
        if tier == HOST:
            record = states.host(world).view(place, world.record_bytes)
        else:
            record = aligned_buffer(world.record_bytes)
            outcome = states.lower[tier - 1].read([Get(place, key, record, world)])[0]
        if outcome is Outcome.OK:
            outcome = _check(states, record, key, world, tier)
            away = states.sealing.is_away(world.domain)
            source = states.lower[tier - 1] if tier != HOST and not away else None
            if outcome is not Outcome.OK and isinstance(source, Shared):
                source.condemn([Get(place, key, record, world)])
    finally:
        with states.lock:
            there = states.index.places[tier][row] == place
            if there and outcome is not Outcome.OK and not states.sealing.is_away(world.domain):
                states.quarantine(row, tier, outcome)
            states.unpin([row])
    return outcome, world.record_bytes


def _check(states: States, record: memoryview, key: bytes, world: World, tier: int) -> Outcome:
    """Verify what lies in the arena where it is; open what came from below in its buffer."""
    if tier == HOST and world.domain in states.hosts:
        return verify(record, key, world.fingerprint, world.payload_bytes)
    return states.sealing.land(record, key, world)
