"""The host tier: slots in shared-memory arenas, one arena per domain, in size classes.

An arena is a memfd that engines of its domain map, so a block is read and written in place. Slots
of one size come from *runs* of whole chunks; all arenas draw their chunks from one budget, so
domains share the host's memory without ever sharing a page: a run that empties is given back to
the kernel before another domain can be given memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from holdfast.buffers import (
    SharedMapping,
    align_up,
    keep_from_dumps,
    populate,
    prefer_huge_pages,
    private_memory,
)
from holdfast.errors import Outcome
from holdfast.limits import MIB
from holdfast.tiers.base import NOWHERE, Get, Place, Put, Reserved, Survivor, Usage

CHUNK_BYTES = 64 * MIB
NAMELESS = -1
"""The name of a slot that nobody named: it is free, being filled, or still read."""

AHEAD_CHUNKS = 8
"""Free chunks whose memory is brought in, for all arenas together; each may have one at least."""

_SLOTS_PER_RUN = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Budget:
    """The bytes all arenas of a host may use together, counted in chunks.

    `ahead_chunks` are free, and their memory was brought in for one of the `arenas` all the same.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.chunk_bytes = min(CHUNK_BYTES, align_up(max(capacity_bytes // 16, 1)))
        self.chunks = capacity_bytes // self.chunk_bytes
        self.free_chunks = self.chunks
        self.ahead_chunks = 0
        self.arenas = 0
        self.lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Bytes the arenas may use together."""
        return self.chunks * self.chunk_bytes


class Ground(Protocol):
    """Memory that slots are laid out in."""

    @property
    def view(self) -> memoryview:
        """All of it."""
        ...

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring pages in ahead of use, where that can be."""
        ...

    def give_back(self, offset: int, nbytes: int) -> None:
        """Say that what lies there is of no use any more."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Arena:
    """Shared memory of one domain: a memfd of a fixed size, and its mapping."""

    def __init__(self, nbytes: int, name: str = "holdfast") -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        # Whoever could shrink it could end every process that has it mapped.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = SharedMapping(self.fd, nbytes)
        keep_from_dumps(self._memory)
        prefer_huge_pages(self._memory)
        self.view = self._memory.view

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring pages in, huge ones where they can be had."""
        populate(self._memory, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the kernel; they read as zeros from now on."""
        self._memory.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def close(self) -> None:
        """Close the descriptor; the memory lives on while others map it."""
        os.close(self.fd)


class PrivateArena:
    """Memory that no other process maps, on huge pages: what it holds is sent, never lent.

    Copies between a socket and huge pages spend about a tenth less.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = private_memory(nbytes)
        self.view = memoryview(self._memory)

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring pages in, huge ones where they can be had."""
        populate(self._memory, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the kernel; they read as zeros from now on."""
        self._memory.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def close(self) -> None:
        """Nothing to close: the memory goes with its last view."""


class _Run:
    """A stretch of whole chunks cut into slots of one size, of which some have a name."""

    __slots__ = ("chunks", "first", "free", "named", "names", "slot_bytes", "used")

    def __init__(self, first: int, chunks: int, slot_bytes: int, chunk_bytes: int) -> None:
        slots, base = chunks * chunk_bytes // slot_bytes, first * chunk_bytes
        self.first = first
        self.chunks = chunks
        self.slot_bytes = slot_bytes
        self.free = [base + slot * slot_bytes for slot in reversed(range(slots))]
        self.used = 0
        self.named = 0
        self.names = array("i", [NAMELESS]) * slots

    def name(self, slot: int, number: int) -> None:
        """Name a slot, or have it nameless again."""
        self.named += (number != NAMELESS) - (self.names[slot] != NAMELESS)
        self.names[slot] = number


class HostTier:
    """One domain's slots. A place is the byte offset of a record in the domain's arena."""

    name = "host"

    def __init__(self, budget: Budget, arena: Ground | None = None) -> None:
        self._budget = budget
        self.arena: Ground = arena or Arena(budget.capacity_bytes)
        self._lock = threading.Lock()
        with budget.lock:
            budget.arenas += 1
        self._runs: dict[int, _Run] = {}
        self._taken = bytearray(budget.chunks)
        self._populated = bytearray(budget.chunks)
        self._ahead = 0
        self._faulted: set[int] = set()
        self._roomy: dict[int, OrderedDict[int, _Run]] = {}
        """By size of their slots, the runs that have free ones; last that of the one freed last."""
        self._live: set[int] = set()
        self._used_bytes = 0
        self._closed = False

    def reserve(self, sizes: Sequence[int]) -> Reserved:
        """Find a slot for each size; drops nothing by itself, the store evicts."""
        places, none_of = list[Place](), 0
        with self._lock:
            for size in sizes:
                place = NOWHERE if size == none_of else self._take(size)
                none_of = size if place == NOWHERE else none_of
                places.append(place)
        return Reserved(places, [])

    def slots(self, record_bytes: int) -> int:
        """Return how many records of this size could lie here at once, were nothing else here."""
        slot_bytes, left, slots = align_up(record_bytes), self._budget.chunks, 0
        for chunks in self._run_lengths(slot_bytes):
            slots += left // chunks * (chunks * self._budget.chunk_bytes // slot_bytes)
            left %= chunks
        return slots

    def name_slot(self, place: Place, number: int) -> None:
        """Name a slot by the caller's number (>= 0) until it is freed, or `NAMELESS` again."""
        self.name_slots([place], [number])

    def name_slots(self, places: Sequence[Place], numbers: Sequence[int]) -> None:
        """Name slots as `name_slot` does."""
        with self._lock:
            runs, chunk_bytes = self._runs, self._budget.chunk_bytes
            for place, number in zip(places, numbers, strict=True):
                run = runs.get(place // chunk_bytes) or runs[self._run_of(place)]
                run.name((place - run.first * chunk_bytes) // run.slot_bytes, number)

    def beside(self, place: Place) -> list[int]:
        """Return the names of all slots in use in the run of a place, as they lie there.

        Empty where a slot in use has no name. Once all of them are freed, the run's memory is
        anybody's.
        """
        with self._lock:
            run, _ = self._slot(place)
            if run.named < run.used:
                return []
            return [number for number in run.names if number != NAMELESS]

    def view(self, place: Place, nbytes: int) -> memoryview:
        """Return the slot itself, writable; valid until the place is freed."""
        return self.arena.view[place : place + nbytes]

    def write(self, batch: Sequence[Put]) -> list[Outcome]:
        """Copy records into their slots; records built in place need no write."""
        return [self._copy(self.view(put.place, len(put.record)), put) for put in batch]

    def read(self, batch: Sequence[Get]) -> list[Outcome]:
        """Copy records out of their slots."""
        outcomes = []
        for get in batch:
            if self._closed or get.place not in self._live:
                outcomes.append(Outcome.GONE if self._closed else Outcome.MISS)
                continue
            get.into[:] = self.view(get.place, len(get.into))
            outcomes.append(Outcome.OK)
        return outcomes

    def free(self, places: Sequence[Place]) -> None:
        """Give slots back; a run that empties returns its chunks to the budget and the kernel."""
        with self._lock:
            for place in places:
                if place in self._live:
                    self._give(place)

    def survivors(self) -> Iterator[Survivor]:
        """Memory survives nothing."""
        return iter(())

    def usage(self) -> Usage:
        """Return fill in bytes of slots in use; the capacity is shared by all domains."""
        return Usage(self._budget.capacity_bytes, self._used_bytes, len(self._live))

    def prefault(self, most: int = AHEAD_CHUNKS) -> bool:
        """Bring the memory of one chunk in, so that no save or fetch pays for it; False if all is.

        A free one that will be handed out soon, while all arenas have fewer than `most` of them;
        else, unless `most` is less than there should be, one in use, page by page so far, whose
        bytes stay as they are. What was brought in and is another arena's by now goes back.
        """
        size = self._budget.chunk_bytes
        with self._lock:
            if self._give_up_ahead():
                return True
            chunk = self._next_ahead(most)
            if chunk is None:
                if not self._faulted or most < AHEAD_CHUNKS:
                    return False
                chunk = self._faulted.pop()
            self._populated[chunk] = 1
        self.arena.populate(chunk * size, size)
        with self._lock:
            if not (self._populated[chunk] or self._taken[chunk]):
                self.arena.give_back(chunk * size, size)  # its run was closed meanwhile
        return True

    def close(self) -> None:
        """Close the arena; engines that still map it see its last contents."""
        if not self._closed:
            self._closed = True
            self.arena.close()

    def _copy(self, slot: memoryview, put: Put) -> Outcome:
        if self._closed or put.place not in self._live:
            return Outcome.GONE
        slot[:] = put.record
        return Outcome.OK

    def _take(self, size: int) -> Place:
        slot_bytes = align_up(size)
        roomy = self._roomy.setdefault(slot_bytes, OrderedDict())
        if not roomy and not self._open_run(slot_bytes):
            return NOWHERE
        run = roomy[next(reversed(roomy))]
        place = run.free.pop()
        if not run.free:
            del roomy[run.first]
        run.used += 1
        self._live.add(place)
        self._used_bytes += slot_bytes
        return Place(place)

    def _give(self, place: int) -> None:
        run, slot = self._slot(place)
        run.name(slot, NAMELESS)
        self._live.remove(place)
        self._used_bytes -= run.slot_bytes
        run.used -= 1
        run.free.append(place)
        roomy = self._roomy[run.slot_bytes]
        roomy[run.first] = run
        roomy.move_to_end(run.first)
        if run.used == 0:
            self._close_run(run)

    def _slot(self, place: int) -> tuple[_Run, int]:
        run = self._runs[self._run_of(place)]
        return run, (place - run.first * self._budget.chunk_bytes) // run.slot_bytes

    def _run_of(self, place: int) -> int:
        chunk = place // self._budget.chunk_bytes
        while chunk not in self._runs:
            chunk -= 1
        return chunk

    def _run_lengths(self, slot_bytes: int) -> range:
        """Return the run lengths to try, in chunks: from little waste down to a single slot."""
        size = self._budget.chunk_bytes
        smallest = -(-slot_bytes // size)
        roomy = -(-slot_bytes * _SLOTS_PER_RUN // size) if slot_bytes * _SLOTS_PER_RUN > size else 1
        return range(max(smallest, roomy), smallest - 1, -1)

    def _open_run(self, slot_bytes: int) -> bool:
        size = self._budget.chunk_bytes
        for chunks in self._run_lengths(slot_bytes):
            first = self._taken.find(bytes(chunks))
            if first >= 0 and self._claim(chunks):
                break
        else:
            return False
        self._taken[first : first + chunks] = b"\1" * chunks
        here = range(first, first + chunks)
        self._count_ahead(-sum(self._populated[chunk] for chunk in here))
        self._faulted.update(chunk for chunk in here if not self._populated[chunk])
        run = _Run(first, chunks, slot_bytes, size)
        self._runs[first] = self._roomy[slot_bytes][first] = run
        return True

    def _claim(self, chunks: int) -> bool:
        with self._budget.lock:
            if self._budget.free_chunks < chunks:
                return False
            self._budget.free_chunks -= chunks
            return True

    def _next_ahead(self, most: int) -> int | None:
        """Take on the next free chunk without memory; None if enough have theirs."""
        budget = self._budget
        with budget.lock:
            own = max(1, most // budget.arenas)
            if self._ahead >= own or budget.ahead_chunks >= budget.free_chunks:
                return None
        chunk = self._taken.find(0)
        while chunk >= 0 and self._populated[chunk]:
            chunk = self._taken.find(0, chunk + 1)
        if chunk < 0:
            return None
        self._count_ahead(1)
        return chunk

    def _give_up_ahead(self) -> bool:
        """Return the memory of a free chunk that the budget has no room for any more."""
        budget, size = self._budget, self._budget.chunk_bytes
        with budget.lock:
            if not self._ahead or budget.ahead_chunks <= budget.free_chunks:
                return False
        ahead = (c for c in range(budget.chunks) if self._populated[c] and not self._taken[c])
        chunk = max(ahead)
        self._populated[chunk] = 0
        self._count_ahead(-1)
        self.arena.give_back(chunk * size, size)
        return True

    def _count_ahead(self, chunks: int) -> None:
        self._ahead += chunks
        with self._budget.lock:
            self._budget.ahead_chunks += chunks

    def _close_run(self, run: _Run) -> None:
        size = self._budget.chunk_bytes
        start, end = run.first * size, (run.first + run.chunks) * size
        del self._runs[run.first], self._roomy[run.slot_bytes][run.first]
        self._taken[run.first : run.first + run.chunks] = bytes(run.chunks)
        self._populated[run.first : run.first + run.chunks] = bytes(run.chunks)
        self._faulted.difference_update(range(run.first, run.first + run.chunks))
        self.arena.give_back(start, end - start)
        with self._budget.lock:
            self._budget.free_chunks += run.chunks
