"""The host tier: slots in shared-memory arenas, one arena per domain, in size classes.

An arena is a memfd that the engines of its domain map, so they read and write blocks in place.
Slots of one size come from *runs* of whole chunks. All arenas take their chunks from one budget, so
domains share the host's memory without sharing a page: an empty run returns its memory to the
kernel before another domain can use the budget.

A process that maps an arena can touch all of it, and the kernel then backs free chunks with memory
that the budget does not count. `reclaim` detects such pages by the size that the kernel reports for
the file, and returns them.

An engine may page-lock chunks in use, on grant (`lock`). A locked chunk is never returned to the
kernel: when its run closes it is *kept*, with its memory, for the next run of its own arena, and
the budget goes on counting it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from holdfast.buffers import align_up
from holdfast.errors import ProtocolError
from holdfast.tiers.arena import Arena, ArenaMemory
from holdfast.tiers.base import NOWHERE, Place, ReservedPlaces, TierUsage
from holdfast.tiers.chunk_locks import LockHolder
from holdfast.tiers.chunks import (
    AHEAD_CHUNKS,
    FREE,
    KEPT,
    PREFAULTED,
    TAKEN,
    TAKEN_FAULTED,
    Chunks,
    HostBudget,
)

NOBODY = 0
"""Owner of runs whose slots are for all."""

NAMELESS = -1
"""Name of a slot without a name: it is free, being written, or still being read."""

_SLOTS_PER_RUN = 8
"""Least number of slots in a run, unless the arena has no room for such a run."""

_log = logging.getLogger(__name__)


class NetworkAgent(Protocol):
    """Registers memory for transfers by a network card, which pins its pages."""

    def register(self, memory: memoryview) -> object:
        """Register memory and return its registration; raise ProtocolError if it fails."""

    def deregister(self, registration: object) -> None:
        """End a registration, whose memory no transfer may be using; raise ProtocolError."""


class _Run:
    """Consecutive whole chunks, divided into slots of one size; slots in use may have a name."""

    __slots__ = (
        "alike",
        "base",
        "chunks",
        "first",
        "free",
        "named",
        "names",
        "registration",
        "slot_bytes",
        "span",
        "used",
    )  # fmt: skip

    def __init__(
        self, span: range, slot_bytes: int, chunk_bytes: int, alike: OrderedDict[int, _Run]
    ) -> None:
        first, chunks = span.start, len(span)
        slots, base = chunks * chunk_bytes // slot_bytes, first * chunk_bytes
        self.first = first
        self.chunks = chunks
        self.span = span
        """The chunks of the run."""
        self.base = base
        """Offset of the first slot in the arena, in bytes."""
        self.slot_bytes = slot_bytes
        self.free = [base + slot * slot_bytes for slot in reversed(range(slots))]
        self.used = 0
        self.named = 0
        self.names = array("i", [NAMELESS]) * slots
        self.registration: object = None
        self.alike = alike
        """The runs with free slots of its size and owner; it is one of them if it has any."""

    def name(self, place: int, number: int) -> None:
        """Set the name of the slot at a place, or remove it (`NAMELESS`)."""
        slot = (place - self.base) // self.slot_bytes
        self.named += (number != NAMELESS) - (self.names[slot] != NAMELESS)
        self.names[slot] = number


class LockUsage(NamedTuple):
    """Chunks of one arena: page-locked by engines, kept while they are, and asked back.

    `bound`: those that no other arena can have: locked, or in a run with a locked one. `runs`: the
    runs in use without a locked chunk.
    """

    locked: int
    bound: int
    kept: int
    recalled: int
    runs: int


class HostTier:
    """The slots of one domain. A place is the byte offset of a record in the domain's arena.

    Records are built and read in their slots (`view`), so it has no `write` and no `read`.
    """

    name = "host"

    def __init__(self, budget: HostBudget, arena: ArenaMemory | None = None) -> None:
        self._budget = budget
        self.arena: ArenaMemory = arena or Arena(budget.capacity_bytes)
        self._lock = threading.Lock()
        with budget.lock:
            budget.arenas += 1
        self._runs: dict[int, _Run] = {}
        self._chunks = Chunks(budget, self.arena)
        self._locks = self._chunks.locks
        self._erased: set[int] = set()
        """First chunks of the runs that were open when the domain was erased."""
        self._with_free: dict[tuple[int, int], OrderedDict[int, _Run]] = {}
        """Runs with free slots, by slot size and owner; the run of the slot freed last is last."""
        self._live: set[int] = set()
        self._used_bytes = 0
        self._registering = threading.Lock()
        self._agent: NetworkAgent | None = None
        self._closed = False

    def register(self, places: Sequence[Place], agent: NetworkAgent) -> None:
        """Register the runs of slots in use with the agent; always pass the same one.

        A run's registration ends when the run closes. Free chunks are never registered: their pages
        would be pinned, and after `give_back` the card would use other pages than the arena. May
        take long, because the run's pages are faulted in and pinned.
        """
        with self._registering:
            if self._closed:
                raise ProtocolError("the store is closed")
            self._agent = agent
            for place in places:
                with self._lock:
                    run = self._run_of(place)
                if run.registration is None:
                    nbytes = run.chunks * self._budget.chunk_bytes
                    self.arena.populate(run.base, nbytes)  # pinned pages cannot become huge later
                    run.registration = agent.register(self.view(Place(run.base), nbytes))

    def reserve(self, sizes: Sequence[int], owner: int = NOBODY) -> ReservedPlaces:
        """Allocate a slot for each size; evicts no block, which is up to the store.

        Slots of an owner are in runs of its own if possible, so that an engine that locks the runs
        of its blocks locks few of others.
        """
        places, none_of = list[Place](), 0
        with self._lock:
            for size in sizes:
                place = NOWHERE if size == none_of else self._take(size, owner)
                none_of = size if place == NOWHERE else none_of
                places.append(place)
        return ReservedPlaces(places, [])

    def slots(self, slot_bytes: int) -> int:
        """Return how many slots of this size fit into an arena without other records."""
        left, slots = self._budget.chunks, 0
        slot_bytes = align_up(slot_bytes)
        for chunks in self._run_lengths(slot_bytes):
            slots += left // chunks * (chunks * self._budget.chunk_bytes // slot_bytes)
            left %= chunks
        return slots

    def name_slots(self, places: Sequence[Place], numbers: Sequence[int]) -> None:
        """Name slots (numbers >= 0) until they are freed, or remove their names (`NAMELESS`)."""
        with self._lock:
            for place, number in zip(places, numbers, strict=True):
                self._run_of(place).name(place, number)

    def beside(self, place: Place) -> list[int]:
        """Return the names of all slots in use in the run of a place, in order of their offset.

        Empty if a slot in use has no name. Freeing all of them releases the run's memory for slots
        of any size.
        """
        with self._lock:
            run = self._run_of(place)
            if run.named < run.used:
                return []
            return [number for number in run.names if number != NAMELESS]

    def unlocked_runs(self) -> list[list[int]]:
        """Return the names of the slots of each run without a lock; as `beside` for each of them.

        Runs with unnamed slots in use are left out.
        """
        with self._lock:
            runs = [run for run in self._runs.values() if run.used and run.named == run.used]
            return [
                [number for number in run.names if number != NAMELESS]
                for run in runs
                if not self._locks.any_locked(run.span)
            ]

    def view(self, place: Place, nbytes: int) -> memoryview:
        """Return the memory of a slot, writable; valid until the place is freed."""
        return self.arena.view[place : place + nbytes]

    def free(self, places: Sequence[Place]) -> None:
        """Free slots; an empty run returns its chunks to the budget, its memory to the kernel."""
        recalled = self._locks.recalled
        with self._lock:
            for place in places:
                if place not in self._live:
                    continue
                run = self._run_of(place)
                run.name(place, NAMELESS)
                self._live.remove(place)
                self._used_bytes -= run.slot_bytes
                run.used -= 1
                run.free.append(place)
                if recalled:
                    self._offer(run)
                else:
                    with_free = run.alike
                    with_free[run.first] = run
                    with_free.move_to_end(run.first)
                if run.used == 0:
                    self._close_run(run)

    def usage(self) -> TierUsage:
        """Return the bytes of slots in use; the capacity is that of all domains together."""
        return TierUsage(self._budget.capacity_bytes, self._used_bytes, len(self._live))

    def run_chunks(self, slot_bytes: int) -> int:
        """Return the chunks of a run of slots of this size."""
        return self._run_lengths(slot_bytes).start

    def lock(self, chunks: Iterable[int], holder: LockHolder, most: int, now_s: float) -> list[int]:
        """Count locks of chunks for a holder; return those granted, which its engine may lock.

        Grants chunks in use that are not asked back and that the holder has not locked, while at
        most `most` are bound: locked, or in a run with a locked one, so that no other arena can
        have them.
        """
        granted = list[int]()
        with self._lock:
            bound = self._bound_chunks()
            for chunk in chunks:
                if self._closed or not self._chunks.is_in_use(chunk):
                    continue
                if self._locks.is_locked_by(chunk, holder):
                    continue
                run = self._run_of(chunk * self._budget.chunk_bytes)
                more = 0 if self._locks.any_locked(run.span) else run.chunks
                if bound + more <= most and self._locks.may_lock(run.span, now_s):
                    self._locks.add(chunk, holder)
                    granted.append(chunk)
                    bound += more
        return granted

    def _bound_chunks(self) -> int:
        """Return the chunks that are locked, and those in a run with a locked one."""
        if not self.has_locks:
            return 0
        runs = self._runs.values()
        in_runs = sum(run.chunks for run in runs if self._locks.any_locked(run.span))
        return in_runs + self._chunks.kept

    def populate(self, chunks: Iterable[int]) -> None:
        """Fault in chunks in use, on huge pages if possible: locked pages cannot become huge."""
        for chunk in chunks:
            with self._lock:
                if self._closed or self._chunks.states[chunk] != TAKEN:
                    continue
                self._chunks.states[chunk] = TAKEN_FAULTED
            self._fault_in(chunk)

    def unlock(self, chunks: Iterable[int], holder: LockHolder, now_s: float) -> int:
        """End a holder's locks of chunks; return how many it had.

        A kept chunk without a lock returns to the budget, and its memory to the kernel.
        """
        ended = 0
        with self._lock:
            for chunk in chunks:
                before = self._locks.is_locked_by(chunk, holder)
                ended += before
                if before and self._locks.remove(chunk, holder, now_s) and not self._closed:
                    self._unlocked(chunk)
        return ended

    def locked_by(self, holder: LockHolder) -> list[int]:
        """Return the chunks that a holder has locked, in order."""
        with self._lock:
            return self._locks.held_by(holder)

    def unlocked_in_use(self, holder: LockHolder, most: int) -> list[int]:
        """Return chunks in use that a holder has not locked, those of the fullest runs first."""
        with self._lock:
            runs = sorted(self._runs.values(), key=lambda run: -run.used * run.slot_bytes)
            chunks = [chunk for run in runs for chunk in run.span if run.used]
            return [each for each in chunks if not self._locks.is_locked_by(each, holder)][:most]

    def is_locked(self, place: Place) -> bool:
        """Return whether an engine has locked any chunk of the run of a place."""
        with self._lock:
            return self.has_locks and self._locks.any_locked(self._run_of(place).span)

    def is_recalled(self, place: Place) -> bool:
        """Return whether the run of a place is asked back: it gets no more blocks."""
        with self._lock:
            return self.has_locks and self._locks.any_recalled(self._run_of(place).span)

    def recall(self, place: Place) -> int:
        """Ask engines for the locked chunks of a place's run; return how many were not yet asked.

        Its blocks stay readable; once it is unlocked it is like every other run.
        """
        with self._lock:
            run = self._run_of(place)
            asked = len(self._locks.recall(run.span))
            if asked:
                run.alike.pop(run.first, None)
            return asked

    def recall_kept(self, most: int) -> int:
        """Ask engines for up to `most` kept chunks; return how many were not yet asked for."""
        with self._lock:
            return self._chunks.recall_kept(most)

    def lock_usage(self) -> LockUsage:
        """Return how many chunks are locked, kept and asked back."""
        with self._lock:
            locks, runs = self._locks, self._runs.values()
            unlocked = sum(not locks.any_locked(run.span) for run in runs)
            bound, recalled = self._bound_chunks(), len(locks.recalled)
            return LockUsage(len(locks), bound, self._chunks.kept, recalled, unlocked)

    def lock_holders(self) -> dict[LockHolder, int]:
        """Return the number of chunks that each holder has locked."""
        with self._lock:
            return self._locks.holders()

    @property
    def recalled_chunks(self) -> int:
        """Locked chunks that are asked back."""
        return len(self._locks.recalled)

    @property
    def has_kept(self) -> bool:
        """Whether a chunk is kept that is not asked back."""
        return KEPT in self._chunks.states

    @property
    def has_locks(self) -> bool:
        """Whether an engine has locked any chunk."""
        return len(self._locks) > 0

    def erase(self) -> None:
        """Overwrite what freed blocks left in kept chunks, now and when the open runs close.

        Other free memory was returned to the kernel, which clears it.
        """
        with self._lock:
            self._erased.update(self._runs)
            self._chunks.erase_kept()
        self.clear_erased()

    def clear_erased(self) -> None:
        """Overwrite the kept chunks of an erased domain whose runs have closed."""
        size = self._budget.chunk_bytes
        while True:
            with self._lock:
                chunk = -1 if self._closed else self._chunks.next_to_clear()
            if chunk < 0:
                return
            self.arena.clear(chunk * size, size)
            with self._lock:
                if not self._closed:
                    self._chunks.cleared(chunk)

    def prefault(self, most: int = AHEAD_CHUNKS) -> bool:
        """Fault in one chunk, so that saves and fetches do not pay for it; False if none is left.

        Takes the next free chunk, while all arenas together have fewer than `most` prefaulted free
        chunks. Otherwise, unless `most` is below `AHEAD_CHUNKS`, takes a chunk in use; its bytes do
        not change. First returns memory of a free chunk if other arenas have used up its budget.
        """
        with self._lock:
            if self._chunks.release_prefaulted():
                return True
            chunk = self._chunks.next_to_prefault(most)
            if chunk < 0:
                chunk = self._chunks.states.find(TAKEN)
                if chunk < 0 or most < AHEAD_CHUNKS:
                    return False
            self._chunks.states[chunk] += PREFAULTED
        self._fault_in(chunk)
        return True

    def reclaim(self) -> int:
        """Release memory of free chunks that other processes touched; return its bytes.

        Costs one system call if there is none. Holds the lock for one chunk at a time.
        """
        before = self._uncounted_bytes()
        if not before:
            return 0
        for chunk in range(self._budget.chunks):
            with self._lock:
                if not self._closed and self._chunks.states[chunk] == FREE:
                    self._chunks.give_back(chunk)
        return max(0, before - self._uncounted_bytes())

    def resident_bytes(self) -> int:
        """Return the bytes of memory that the kernel holds for the arena; 0 after `close`."""
        with self._lock:
            return 0 if self._closed else self.arena.resident_bytes()

    def give_up_copy(self) -> None:
        """Release, in a forked child, the memory that it shares with the parent."""
        self._closed = True
        if isinstance(self.arena, Arena):
            self.arena.give_up_copy()

    def close(self) -> None:
        """Close the arena; an engine that still maps it sees its last contents."""
        with self._registering, self._lock:
            if not self._closed:
                self._closed = True
                for run in self._runs.values():
                    self._deregister(run)
                self.arena.close()

    def _uncounted_bytes(self) -> int:
        """Return the bytes of memory that the budget does not count for this arena."""
        with self._lock:
            if self._closed:
                return 0
            counted = self._budget.chunks - self._chunks.states.count(FREE)
            return max(0, self.arena.resident_bytes() - counted * self._budget.chunk_bytes)

    def _take(self, size: int, owner: int) -> Place:
        slot_bytes = align_up(size)
        with_free = self._with_free.get((slot_bytes, owner))
        if not with_free and not (with_free := self._runs_with_free(slot_bytes, owner)):
            return NOWHERE
        run = with_free[next(reversed(with_free))]
        place = run.free.pop()
        if not run.free:
            del with_free[run.first]
        run.used += 1
        self._live.add(place)
        self._used_bytes += slot_bytes
        return Place(place)

    def _runs_with_free(self, slot_bytes: int, owner: int) -> OrderedDict[int, _Run]:
        """Return runs with a free slot: of the owner, of nobody, a new one, or of another owner."""
        for each in (owner, NOBODY):
            if with_free := self._with_free.setdefault((slot_bytes, each), OrderedDict()):
                return with_free
        if not self._open_run(slot_bytes, owner):
            for (size, _), others in self._with_free.items():
                if size == slot_bytes and others:
                    return others
        return self._with_free[slot_bytes, owner]

    def _run_of(self, place: int) -> _Run:
        chunk = place // self._budget.chunk_bytes
        while (run := self._runs.get(chunk)) is None:
            chunk -= 1
        return run

    def _run_lengths(self, slot_bytes: int) -> range:
        """Return the run lengths to try, in chunks: for `_SLOTS_PER_RUN` slots down to one slot.

        Empty for slots of 0 bytes.
        """
        size = self._budget.chunk_bytes
        smallest, preferred = -(-slot_bytes // size), -(-slot_bytes * _SLOTS_PER_RUN // size)
        return range(preferred, max(smallest, 1) - 1, -1)

    def _open_run(self, slot_bytes: int, owner: int) -> bool:
        for chunks in self._run_lengths(slot_bytes):
            first = self._chunks.open(chunks)
            if first >= 0:
                span = range(first, first + chunks)
                alike = self._with_free[slot_bytes, owner]
                run = _Run(span, slot_bytes, self._budget.chunk_bytes, alike)
                self._runs[first] = alike[first] = run
                return True
        return False

    def _offer(self, run: _Run) -> None:
        """Let new blocks use a run's free slots, these first; not while the run is asked back."""
        if run.free and not self._locks.any_recalled(run.span):
            with_free = run.alike
            with_free[run.first] = run
            with_free.move_to_end(run.first)

    def _unlocked(self, chunk: int) -> None:
        """Release a chunk that lost its last lock if it is kept; else offer its run again."""
        if not self._chunks.release_kept(chunk) and self._chunks.is_in_use(chunk):
            self._offer(self._run_of(chunk * self._budget.chunk_bytes))

    def _fault_in(self, chunk: int) -> None:
        """Fault in the memory of a chunk, without the lock while it takes long."""
        size = self._budget.chunk_bytes
        self.arena.populate(chunk * size, size)
        with self._lock:
            if self._chunks.states[chunk] == FREE and not self._closed:
                self._chunks.give_back(chunk)  # its run was closed in the meantime

    def _deregister(self, run: _Run) -> bool:
        """End a run's registration, if there is one; False if that fails."""
        if self._agent is None or run.registration is None:
            return True
        try:
            self._agent.deregister(run.registration)
        except ProtocolError as error:
            _log.warning("a run of host memory stays in use: %s", error)
            return False
        run.registration = None
        return True

    def _close_run(self, run: _Run) -> None:
        if not self._deregister(run):
            return
        del self._runs[run.first]
        run.alike.pop(run.first, None)
        erased = run.first in self._erased
        self._erased.discard(run.first)
        self._chunks.close(run.span, erased=erased)
