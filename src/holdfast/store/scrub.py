"""Scrub: read and verify stored copies at a limited rate, and forget those that are bad.

Without it, corruption is found only when a block is needed. It runs on demand (`holdfast verify`)
and in the background, slowly and at the lowest priority. A copy on a local tier that could not be
read is not bad: see `BlockTable.quarantine`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.status import ScrubStatus
from holdfast.store.block_table import HOST, ROWS_AT_ONCE, BlockTable
from holdfast.store.core import StoreParts
from holdfast.store.verify import read_copy, verify_record
from holdfast.tiers.base import TierGet

_RATE_MIN = MIB
_PASS_SHARE = 0.8
"""Share of the period in which a pass should end."""

_NICE = 15
_YIELD_S = 0.02
_YIELDS_MAX = 50

_log = logging.getLogger("holdfast.store")


class ScrubRequest(NamedTuple):
    """What to scrub: one fingerprint (hex) or all, rows from `start` on, for about `seconds`.

    `rate` is in bytes a second, 0: unlimited. `shared`: include shared tiers.
    """

    fingerprint: str = ""
    start: int = 0
    seconds: float = float("inf")
    rate: int = 0
    shared: bool = True


EVERY_COPY = ScrubRequest()


def scrub(
    store: StoreParts, request: ScrubRequest = EVERY_COPY, stop: threading.Event | None = None
) -> dict[str, Any]:
    """Read and verify stored copies; forget bad ones. Serving continues.

    `next` is where to continue, -1 at the end; `owes_s`: how long to wait first, to keep to the
    rate.
    """
    stop = stop or threading.Event()
    begun, nbytes, checked, following = store.clock.now(), 0, 0, -1
    bad: list[dict[str, str]] = []
    for row in _rows(store.table, request):
        spent = store.clock.now() - begun
        if request.rate and nbytes / request.rate > spent:
            stop.wait(min(nbytes / request.rate, request.seconds) - spent)
            spent = store.clock.now() - begun
        if stop.is_set() or (spent >= request.seconds and row > request.start):
            following = row
            break
        for tier in range(1 + len(store.table.lower)):
            if tier in store.table.shared and not request.shared:
                continue
            outcome, size = _verify_copy(store, row, tier)
            if outcome is not Outcome.MISS:
                checked, nbytes = checked + 1, nbytes + size
            if outcome not in (Outcome.OK, Outcome.MISS):
                bad.append({"tier": store.table.tier_name(tier), "outcome": str(outcome)})
    took = nbytes / request.rate if request.rate else 0.0
    owes_s = max(0.0, took - (store.clock.now() - begun))
    return {"checked": checked, "bytes": nbytes, "bad": bad, "next": following, "owes_s": owes_s}


class Scrubber:
    """The background scrub of a store: one pass per `every_s`, at most `rate` bytes a second.

    `every_s` 0 turns it off. `rate` 0: as fast as the period needs.
    """

    def __init__(self, store: StoreParts, every_s: float, rate: int = 0) -> None:
        self._every_s = every_s
        self._rate = rate
        self.passes = self.checked = self.checked_bytes = self.corrupt = 0
        self._store = store
        self._stop = threading.Event()
        """Ends the present thread; one that was given up has another one."""
        self._next = 0
        """The row at which the present pass goes on."""
        self._is_in_pass = False
        self._thread = self._new_thread()

    def start(self) -> None:
        """Begin after recovery has ended."""
        if self._every_s:
            self._thread.start()

    def close(self) -> None:
        """Stop at once."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def give_up_hung_call(self) -> None:
        """Go on after a drive was lost, though a read of it may never return.

        A pass is continued by a new thread. The former one ends when its read does.
        """
        if not (self._is_in_pass and self._thread.is_alive()) or self._stop.is_set():
            return
        former_stop, self._stop = self._stop, threading.Event()
        thread = self._new_thread()
        self._is_in_pass = False
        try:
            thread.start()
        except RuntimeError as error:
            self._stop, self._is_in_pass = former_stop, True
            _log.warning(
                "%s: no thread to scrub the drive that replaces a lost one; the scrub goes on "
                "when its read of the lost one has ended; raise the limit of threads",
                error,
            )
            return
        former_stop.set()
        self._thread = thread

    def status(self) -> ScrubStatus:
        """Return what was read since start, and how much of it was corrupt."""
        return ScrubStatus(self.passes, self.checked, self.checked_bytes, self.corrupt)

    def pace(self) -> int:
        """Return the rate in bytes a second with which a pass ends well within its period."""
        table = self._store.table
        lower = [tier for n, tier in enumerate(table.lower, start=1) if n not in table.shared]
        with table.lock:
            usages = [host.usage() for host in table.all_hosts()]
        usages += [tier.usage() for tier in lower]
        held = sum(usage.used_bytes for usage in usages)
        needed = max(_RATE_MIN, int(held / (_PASS_SHARE * self._every_s)))
        return min(self._rate, needed) if self._rate else needed

    def run_pass(self) -> None:
        """Run one pass, or the rest of one, until `close`."""
        stop, self._is_in_pass = self._stop, True
        while self._next >= 0 and not stop.is_set():
            self._wait_for_fetches()
            request = ScrubRequest("", self._next, 1.0, self.pace(), shared=False)
            found = scrub(self._store, request, stop)
            if stop is not self._stop:  # it was given up, and another thread goes on
                return
            self._next = found["next"]
            self.checked += found["checked"]
            self.checked_bytes += found["bytes"]
            self.corrupt += sum(bad["outcome"] == Outcome.CORRUPT for bad in found["bad"])
            if found["bad"]:
                _log.warning("scrub found bad copies=%d", len(found["bad"]))
            if self._next >= 0:
                stop.wait(found["owes_s"])
        if self._next < 0:
            self.passes += 1
            self._next = 0
        self._is_in_pass = False

    def _wait_for_fetches(self) -> None:
        """Wait while fetches are in progress, up to a limit."""
        for _ in range(_YIELDS_MAX):
            if not self._store.table.copies.fillings(HOST) or self._stop.wait(_YIELD_S):
                return

    def _new_thread(self) -> threading.Thread:
        name = "holdfast-scrub"
        return threading.Thread(target=self._run, args=(self._stop,), name=name, daemon=True)

    def _run(self, stop: threading.Event) -> None:
        with contextlib.suppress(OSError):  # Linux: the niceness of one thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._store.recovery.wait()
        while not stop.is_set():
            begun = self._store.clock.now()
            try:
                self.run_pass()
            except Exception:  # noqa: BLE001  # without this thread no corruption would be found
                _log.exception("a scrub ended early; the next one begins in time")
                self._next = 0 if stop is self._stop else self._next
            stop.wait(max(1.0, begun + self._every_s - self._store.clock.now()))


def _rows(table: BlockTable, request: ScrubRequest) -> Iterator[int]:
    """Yield the requested rows in order, holding the lock only for moments."""
    index, at = table.index, max(0, request.start)
    while True:
        with table.lock:
            part = range(at, min(at + ROWS_AT_ONCE, len(index.keys)))
            rows = [
                row
                for row in part
                if index.keys[row] is not None
                and request.fingerprint in ("", index.namespace(row).fingerprint.hex())
            ]
        yield from rows
        at = part.stop
        if not part:
            return


def _verify_copy(store: StoreParts, row: int, tier: int) -> tuple[Outcome, int]:
    """Verify one copy; return its outcome (MISS if there is none) and the bytes read."""
    table = store.table
    with table.lock:
        key, place = table.index.keys[row], table.copies.place(row, tier)
        if key is None or place < 0:
            return Outcome.MISS, 0
        namespace, nbytes = table.index.namespace(row), table.index.stored_bytes(row, tier)
        if table.sealing.is_away(namespace.domain):
            return Outcome.MISS, 0
        table.pin([row])
    outcome = Outcome.OK
    try:
        outcome, record = read_copy(table, row, tier, place)
        if outcome is Outcome.OK:
            outcome = verify_record(table, record, key, namespace, tier)
            source = None if table.sealing.is_away(namespace.domain) else table.shared.get(tier)
            if source is not None and outcome not in (Outcome.OK, Outcome.UNREADABLE):
                source.delete_corrupt([TierGet(place, key, record, namespace)])
    finally:
        with table.lock:
            there = table.copies.place(row, tier) == place
            if there and outcome is not Outcome.OK and not table.sealing.is_away(namespace.domain):
                table.read_failed(row, tier, outcome)
            elif outcome is Outcome.OK:
                table.failed_reads.note_read(tier, [place], table.clock.now())
            table.unpin([row])
    return outcome, nbytes
