"""The host tier: slots in shared-memory arenas, one arena per domain, in size classes.

An arena is a memfd that the engines of its domain map, so they read and write blocks in place.
Slots of one size come from *runs* of whole chunks. All arenas take their chunks from one budget, so
domains share the host's memory without sharing a page: an empty run returns its memory to the
kernel before another domain can use the budget.

A process that maps an arena can touch all of it, and the kernel then backs free chunks with memory
that the budget does not count. `reclaim` detects such pages by the size that the kernel reports for
the file, and returns them.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from holdfast.buffers import (
    PrivateMapping,
    SharedMapping,
    align_up,
    keep_from_dumps,
    populate,
    prefer_huge_pages,
)
from holdfast.errors import ProtocolError
from holdfast.limits import MIB
from holdfast.tiers.base import NOWHERE, Place, ReservedPlaces, TierUsage

CHUNK_BYTES = 64 * MIB
NAMELESS = -1
"""Name of a slot without a name: it is free, being written, or still being read."""

AHEAD_CHUNKS = 8
"""Most free chunks that are prefaulted, over all arenas; every arena may have at least one."""

_SLOTS_PER_RUN = 8
"""Least number of slots in a run, unless the arena has no room for such a run."""

_STAT_BLOCK_BYTES = 512
"""Unit of `st_blocks`, on every file system (stat(2))."""

_FREE, _PREFAULTED, _TAKEN, _TAKEN_FAULTED = range(4)
"""State of a chunk: free or in use; the odd ones have memory because `prefault` faulted it in."""

_IN_USE = bytes((0, 0, 1, 1)).ljust(256, b"\0")
"""Translates the states of chunks: 1 for those in use, 0 for free ones."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_log = logging.getLogger(__name__)


class NetworkAgent(Protocol):
    """Registers memory for transfers by a network card, which pins its pages."""

    def register(self, memory: memoryview) -> object:
        """Register memory and return its registration; raise ProtocolError if it fails."""

    def deregister(self, registration: object) -> None:
        """End a registration, whose memory no transfer may be using; raise ProtocolError."""


class HostBudget:
    """The bytes that all arenas of a host may use together, counted in chunks.

    `prefaulted_chunks` of the `free_chunks` already have memory, in one of the `arenas`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.chunk_bytes = min(CHUNK_BYTES, align_up(max(capacity_bytes // 16, 1)))
        self.chunks = capacity_bytes // self.chunk_bytes
        self.free_chunks = self.chunks
        self.prefaulted_chunks = 0
        self.arenas = 0
        self.lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Bytes the arenas may use together."""
        return self.chunks * self.chunk_bytes


class ArenaMemory:
    """Memory that holds slots, in `view`; without the methods, memory that is always there."""

    view: memoryview

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault pages in ahead of use, if the memory supports it."""

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the kernel, if the memory supports it; their contents are lost."""

    def resident_bytes(self) -> int:
        """Return the bytes of memory that the kernel holds for it, swapped pages included.

        0 if no other process can map it: then only the tier faults pages in.
        """
        return 0

    def close(self) -> None:
        """Release the memory; by default it is released with its last view."""


class Arena(ArenaMemory):
    """Shared memory of one domain: a memfd of a fixed size, and its mapping."""

    def __init__(self, nbytes: int, name: str = "holdfast") -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        # A process that shrank the file would crash every process that maps it.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = SharedMapping(self.fd, nbytes)
        keep_from_dumps(self._memory)
        prefer_huge_pages(self._memory)
        self.view = self._memory.view

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault pages in, as huge pages if possible."""
        populate(self._memory, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the kernel; they read as zeros afterwards."""
        self._memory.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def resident_bytes(self) -> int:
        """Return the bytes that the kernel holds for the file, faulted in by any process."""
        return os.fstat(self.fd).st_blocks * _STAT_BLOCK_BYTES

    def close(self) -> None:
        """Close the descriptor; the memory exists for as long as a process maps it."""
        os.close(self.fd)

    def give_up_copy(self) -> None:
        """Replace the mapping by private memory in a forked child, so that it shares no byte."""
        os.close(self.fd)
        self._memory.give_up_copy()


class PrivateArena(ArenaMemory):
    """Memory that no other process maps, on huge pages: its blocks are copied, not mapped.

    A copy between a socket and huge pages takes about a tenth less time.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = PrivateMapping(nbytes)
        self.view = self._memory.view

    def populate(self, offset: int, nbytes: int) -> None:
        populate(self._memory, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, offset, nbytes)


class _Run:
    """Consecutive whole chunks, divided into slots of one size; slots in use may have a name."""

    __slots__ = (
        "base", "chunks", "first", "free", "named", "names", "registration", "slot_bytes", "used",
    )  # fmt: skip

    def __init__(self, first: int, chunks: int, slot_bytes: int, chunk_bytes: int) -> None:
        slots, base = chunks * chunk_bytes // slot_bytes, first * chunk_bytes
        self.first = first
        self.chunks = chunks
        self.base = base
        """Offset of the first slot in the arena, in bytes."""
        self.slot_bytes = slot_bytes
        self.free = [base + slot * slot_bytes for slot in reversed(range(slots))]
        self.used = 0
        self.named = 0
        self.names = array("i", [NAMELESS]) * slots
        self.registration: object = None

    def name(self, place: int, number: int) -> None:
        """Set the name of the slot at a place, or remove it (`NAMELESS`)."""
        slot = (place - self.base) // self.slot_bytes
        self.named += (number != NAMELESS) - (self.names[slot] != NAMELESS)
        self.names[slot] = number


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
        self._chunks = bytearray(budget.chunks)
        self._with_free: dict[int, OrderedDict[int, _Run]] = {}
        """Runs with free slots, by slot size; the run of the slot freed last comes last."""
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

    def reserve(self, sizes: Sequence[int]) -> ReservedPlaces:
        """Allocate a slot for each size; evicts no block, which is up to the store."""
        places, none_of = list[Place](), 0
        with self._lock:
            for size in sizes:
                place = NOWHERE if size == none_of else self._take(size)
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

    def view(self, place: Place, nbytes: int) -> memoryview:
        """Return the memory of a slot, writable; valid until the place is freed."""
        return self.arena.view[place : place + nbytes]

    def free(self, places: Sequence[Place]) -> None:
        """Free slots; an empty run returns its chunks to the budget, its memory to the kernel."""
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
                with_free = self._with_free[run.slot_bytes]
                with_free[run.first] = run
                with_free.move_to_end(run.first)
                if run.used == 0:
                    self._close_run(run)

    def usage(self) -> TierUsage:
        """Return the bytes of slots in use; the capacity is that of all domains together."""
        return TierUsage(self._budget.capacity_bytes, self._used_bytes, len(self._live))

    def prefault(self, most: int = AHEAD_CHUNKS) -> bool:
        """Fault in one chunk, so that saves and fetches do not pay for it; False if none is left.

        Takes the next free chunk, while all arenas together have fewer than `most` prefaulted free
        chunks. Otherwise, unless `most` is below `AHEAD_CHUNKS`, takes a chunk in use; its bytes do
        not change. First returns memory of a free chunk if other arenas have used up its budget.
        """
        size = self._budget.chunk_bytes
        with self._lock:
            if self._release_prefaulted():
                return True
            chunk = self._next_free_chunk(most)
            if chunk is None:
                chunk = self._chunks.find(_TAKEN)
                if chunk < 0 or most < AHEAD_CHUNKS:
                    return False
            self._chunks[chunk] += _PREFAULTED
        self.arena.populate(chunk * size, size)
        with self._lock:
            if self._chunks[chunk] == _FREE:
                self.arena.give_back(chunk * size, size)  # its run was closed in the meantime
        return True

    def reclaim(self) -> int:
        """Release memory of free chunks that other processes touched; return its bytes.

        Costs one system call if there is none. Holds the lock for one chunk at a time.
        """
        budget, size = self._budget, self._budget.chunk_bytes
        before = self._uncounted_bytes()
        if not before:
            return 0
        for chunk in range(budget.chunks):
            with self._lock:
                if not self._closed and self._chunks[chunk] == _FREE:
                    self.arena.give_back(chunk * size, size)
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
            counted = self._budget.chunks - self._chunks.count(_FREE)
            return max(0, self.arena.resident_bytes() - counted * self._budget.chunk_bytes)

    def _take(self, size: int) -> Place:
        slot_bytes = align_up(size)
        with_free = self._with_free.setdefault(slot_bytes, OrderedDict())
        if not with_free and not self._open_run(slot_bytes):
            return NOWHERE
        run = with_free[next(reversed(with_free))]
        place = run.free.pop()
        if not run.free:
            del with_free[run.first]
        run.used += 1
        self._live.add(place)
        self._used_bytes += slot_bytes
        return Place(place)

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

    def _open_run(self, slot_bytes: int) -> bool:
        budget, in_use = self._budget, self._chunks.translate(_IN_USE)
        for chunks in self._run_lengths(slot_bytes):
            first = in_use.find(bytes(chunks))
            if first < 0:
                continue
            with budget.lock:
                granted = budget.free_chunks >= chunks
                budget.free_chunks -= chunks * granted
            if granted:
                break
        else:
            return False
        self._count_prefaulted(-self._chunks.count(_PREFAULTED, first, first + chunks))
        for chunk in range(first, first + chunks):
            self._chunks[chunk] += _TAKEN
        run = _Run(first, chunks, slot_bytes, budget.chunk_bytes)
        self._runs[first] = self._with_free[slot_bytes][first] = run
        return True

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

    def _next_free_chunk(self, most: int) -> int | None:
        """Return the next free chunk to prefault, counted as such; None if enough are."""
        budget = self._budget
        with budget.lock:
            own = max(1, most // budget.arenas)
            prefaulted = self._chunks.count(_PREFAULTED)
            if prefaulted >= own or budget.prefaulted_chunks >= budget.free_chunks:
                return None
        chunk = self._chunks.find(_FREE)
        if chunk < 0:
            return None
        self._count_prefaulted(1)
        return chunk

    def _release_prefaulted(self) -> bool:
        """Return the memory of one prefaulted chunk, if the budget has fewer free chunks."""
        budget, size = self._budget, self._budget.chunk_bytes
        with budget.lock:
            chunk = self._chunks.rfind(_PREFAULTED)
            if chunk < 0 or budget.prefaulted_chunks <= budget.free_chunks:
                return False
        self._chunks[chunk] = _FREE
        self._count_prefaulted(-1)
        self.arena.give_back(chunk * size, size)
        return True

    def _count_prefaulted(self, chunks: int) -> None:
        with self._budget.lock:
            self._budget.prefaulted_chunks += chunks

    def _close_run(self, run: _Run) -> None:
        if not self._deregister(run):
            return
        del self._runs[run.first], self._with_free[run.slot_bytes][run.first]
        self._chunks[run.first : run.first + run.chunks] = bytes(run.chunks)
        self.arena.give_back(run.base, run.chunks * self._budget.chunk_bytes)
        with self._budget.lock:
            self._budget.free_chunks += run.chunks
