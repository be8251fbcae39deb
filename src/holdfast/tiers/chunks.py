"""The chunks of an arena: free, in use, or kept because an engine has page-locked them.

All arenas of a host take chunks from one budget. A chunk that an engine has locked is never
returned to the kernel: the engine's GPU would go on with the old pages. It is kept, with its
memory, for the next run of its own arena, and the budget goes on counting it.
"""

from __future__ import annotations

import threading
from itertools import accumulate

from holdfast.buffers import align_up
from holdfast.limits import MIB
from holdfast.tiers.arena import ArenaMemory
from holdfast.tiers.chunk_locks import ChunkLocks

CHUNK_BYTES = 64 * MIB

AHEAD_CHUNKS = 8
"""Most free chunks that are prefaulted, over all arenas; every arena may have at least one."""

FREE, PREFAULTED, TAKEN, TAKEN_FAULTED, KEPT, WITHHELD = range(6)
"""State of a chunk: free, in use, or kept. PREFAULTED and TAKEN_FAULTED have memory because it was
faulted in ahead. KEPT is free for a run of this arena, WITHHELD is not: the chunk is asked back, or
its bytes are to be overwritten."""

_IN_USE = bytes((0, 0, 1, 1, 0, 1)).ljust(256, b"\0")
_COUNTED = bytes((0, 0, 1, 1, 1, 1)).ljust(256, b"\0")
_OPENED = bytes((TAKEN, TAKEN_FAULTED, TAKEN, TAKEN_FAULTED, TAKEN_FAULTED, WITHHELD))
"""Translate the states of chunks: 1 for those that no run can take, 1 for those that the budget
counts as used, and the state that each has in a run."""


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


class Chunks:
    """The state and the locks of the chunks of one arena. Call under the host tier's lock."""

    def __init__(self, budget: HostBudget, arena: ArenaMemory) -> None:
        self.states = bytearray(budget.chunks)
        self.locks = ChunkLocks()
        self._budget = budget
        self._arena = arena
        self._to_clear: set[int] = set()
        """Kept chunks that are withheld until they are overwritten."""
        self._clearing: set[int] = set()

    @property
    def kept(self) -> int:
        """The number of chunks that no run uses, and that stay because they are locked."""
        return self.states.count(KEPT) + self.states.count(WITHHELD)

    def is_in_use(self, chunk: int) -> bool:
        """Return whether a chunk of this number exists and belongs to a run."""
        in_arena = 0 <= chunk < len(self.states)
        return in_arena and self.states[chunk] in (TAKEN, TAKEN_FAULTED)

    def open(self, chunks: int) -> int:
        """Take consecutive chunks for a run, kept ones first; return the first one, -1 if none."""
        first = self._take_span(chunks)
        if first >= 0:
            self.count_prefaulted(-self.states.count(PREFAULTED, first, first + chunks))
            span = slice(first, first + chunks)
            self.states[span] = self.states[span].translate(_OPENED.ljust(256, b"\0"))
        return first

    def close(self, span: range, *, erased: bool) -> None:
        """Release the chunks of a run; keep those that are locked.

        `erased`: kept ones are overwritten before another run takes them.
        """
        if not self.locks.any_locked(span):
            self._release(span.start, len(span))
            return
        for chunk in span:
            if not self.locks.is_locked(chunk):
                self._release(chunk, 1)
                continue
            withheld = erased or chunk in self.locks.recalled
            self.states[chunk] = WITHHELD if withheld else KEPT
            if erased:
                self._to_clear.add(chunk)

    def release_kept(self, chunk: int) -> bool:
        """Release a kept chunk that has lost its last lock; False if a run uses it."""
        if self.states[chunk] not in (KEPT, WITHHELD):
            return False
        self._to_clear.discard(chunk)
        if chunk not in self._clearing:  # else `cleared` releases it
            self._release(chunk, 1)
        return True

    def recall_kept(self, most: int) -> int:
        """Ask engines for up to `most` kept chunks; return how many were not yet asked for."""
        kept = [chunk for chunk, state in enumerate(self.states) if state == KEPT][:most]
        for chunk in kept:
            self.states[chunk] = WITHHELD
        return len(self.locks.recall(kept))

    def erase_kept(self) -> None:
        """Withhold all kept chunks until they are overwritten."""
        for chunk, state in enumerate(self.states):
            if state in (KEPT, WITHHELD):
                self.states[chunk] = WITHHELD
                self._to_clear.add(chunk)

    def next_to_clear(self) -> int:
        """Return a chunk to overwrite without the lock, then to pass to `cleared`; -1: none."""
        if not self._to_clear:
            return -1
        chunk = self._to_clear.pop()
        self._clearing.add(chunk)
        return chunk

    def cleared(self, chunk: int) -> None:
        """Note that a chunk was overwritten; release it if it lost its last lock meanwhile."""
        self._clearing.discard(chunk)
        if not self.locks.is_locked(chunk):
            self._to_clear.discard(chunk)
            self._release(chunk, 1)
        elif chunk not in self.locks.recalled and chunk not in self._to_clear:
            self.states[chunk] = KEPT

    def next_to_prefault(self, most: int) -> int:
        """Return the next free chunk to fault in, counted as such; -1 if there are enough."""
        budget = self._budget
        with budget.lock:
            own = max(1, most // budget.arenas)
            prefaulted = self.states.count(PREFAULTED)
            if prefaulted >= own or budget.prefaulted_chunks >= budget.free_chunks:
                return -1
        chunk = self.states.find(FREE)
        if chunk >= 0:
            self.count_prefaulted(1)
        return chunk

    def release_prefaulted(self) -> bool:
        """Return the memory of one prefaulted chunk, if the budget has fewer free chunks."""
        budget = self._budget
        with budget.lock:
            chunk = self.states.rfind(PREFAULTED)
            if chunk < 0 or budget.prefaulted_chunks <= budget.free_chunks:
                return False
        self.states[chunk] = FREE
        self.count_prefaulted(-1)
        self.give_back(chunk)
        return True

    def give_back(self, first: int, chunks: int = 1) -> None:
        """Return the memory of free chunks to the kernel, which clears it."""
        size = self._budget.chunk_bytes
        self._arena.give_back(first * size, chunks * size)

    def count_prefaulted(self, chunks: int) -> None:
        """Add to the budget's number of free chunks that have memory."""
        with self._budget.lock:
            self._budget.prefaulted_chunks += chunks

    def _release(self, first: int, chunks: int) -> None:
        """Return chunks to the budget, and their memory to the kernel."""
        self.states[first : first + chunks] = bytes(chunks)
        self.give_back(first, chunks)
        with self._budget.lock:
            self._budget.free_chunks += chunks

    def _take_span(self, chunks: int) -> int:
        """Return the first of consecutive chunks, taken from the budget unless kept; -1 if none.

        Kept and free chunks share a run only if there is no other, because what is locked in a run
        holds all of it.
        """
        if KEPT not in self.states:
            first = self.states.translate(_IN_USE).find(bytes(chunks))
            return first if first >= 0 and self._granted(chunks) else -1
        first = self.states.find(bytes((KEPT,)) * chunks)
        if first >= 0:
            return first
        first = self.states.translate(_COUNTED).find(bytes(chunks))
        if first >= 0 and self._granted(chunks):
            return first
        taken, counted = (
            list(accumulate(self.states.translate(table), initial=0))
            for table in (_IN_USE, _COUNTED)
        )
        kept, first = max(
            (
                (counted[at + chunks] - counted[at], -at)
                for at in range(len(self.states) - chunks + 1)
                if taken[at + chunks] == taken[at]
            ),
            default=(0, 1),
        )
        return -first if first < 1 and self._granted(chunks - kept) else -1

    def _granted(self, chunks: int) -> bool:
        """Take chunks from the budget; False if it has fewer."""
        budget = self._budget
        with budget.lock:
            granted = budget.free_chunks >= chunks
            budget.free_chunks -= chunks * granted
        return granted
