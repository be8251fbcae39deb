"""Arenas: the memory that holds the slots of a host tier, shared with engines or private."""

from __future__ import annotations

import fcntl
import mmap
import os

from holdfast.buffers import (
    PrivateMapping,
    SharedMapping,
    keep_from_dumps,
    populate,
    prefer_huge_pages,
)
from holdfast.limits import MIB

_STAT_BLOCK_BYTES = 512
"""Unit of `st_blocks`, on every file system (stat(2))."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaMemory:
    """Memory that holds slots, in `view`; without the methods, memory that is always there."""

    view: memoryview

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault pages in ahead of use, if the memory supports it."""

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the kernel, if the memory supports it; their contents are lost."""

    def clear(self, offset: int, nbytes: int) -> None:
        """Overwrite memory with zeros; its pages stay."""
        for at in range(offset, offset + nbytes, MIB):
            part = min(MIB, offset + nbytes - at)
            self.view[at : at + part] = bytes(part)

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
        self.mapping = SharedMapping(self.fd, nbytes)
        """The memory, for devices, which copy by address."""
        keep_from_dumps(self.mapping)
        prefer_huge_pages(self.mapping)
        self.view = self.mapping.view

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault pages in, as huge pages if possible."""
        populate(self.mapping, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the kernel; they read as zeros afterwards."""
        self.mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def resident_bytes(self) -> int:
        """Return the bytes that the kernel holds for the file, faulted in by any process."""
        return os.fstat(self.fd).st_blocks * _STAT_BLOCK_BYTES

    def close(self) -> None:
        """Close the descriptor; the memory exists for as long as a process maps it."""
        os.close(self.fd)

    def give_up_copy(self) -> None:
        """Replace the mapping by private memory in a forked child, so that it shares no byte."""
        os.close(self.fd)
        self.mapping.give_up_copy()


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
