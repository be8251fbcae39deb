"""Aligned memory and the one way to look at it: writable byte views, never copies."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from typing import Any, Protocol

ALIGNMENT = 4096
"""Direct I/O wants addresses, offsets and lengths in multiples of this."""

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page: of x86-64, and of other processors with pages of 4 KiB."""

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is >= `nbytes`."""
    return -(-nbytes // alignment) * alignment


def aligned_buffer(nbytes: int) -> memoryview:
    """Return zeroed private memory of at least `nbytes`, page-aligned, on huge pages if possible.

    The caller owns it; it is unmapped when the last view is gone. Memory that holds a huge page
    begins with one, which the kernel sees to for multiples of such pages only; what is left of
    it behind the last whole one takes small pages.
    """
    if nbytes < HUGE_PAGE:
        return memoryview(private_memory(align_up(max(nbytes, 1))))[:nbytes]
    memory = _private(align_up(nbytes) + HUGE_PAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    prefer_huge_pages(memory, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return memoryview(memory)[start : start + nbytes]


def private_memory(nbytes: int) -> mmap.mmap:
    """Map memory that only this process sees, and no core dump: shared seldom gets huge pages."""
    memory = _private(nbytes)
    prefer_huge_pages(memory)
    return memory


def _private(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keep_from_dumps(memory)
    return memory


class Advisable(Protocol):
    """Mapped memory that the kernel can be told about."""

    def madvise(self, option: int, start: int = 0, length: int = 0, /) -> None:
        """Advise the kernel, by default about all of it; raise OSError where it refuses."""
        ...


class SharedMapping:
    """A file of memory mapped at a multiple of `HUGE_PAGE`: huge pages of it need that.

    The descriptor stays the caller's. Unmapped when the last view of `view` is gone. Raises
    OSError, or ValueError if the file is shorter: to touch its end would end the process.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        if not 0 < nbytes <= os.fstat(fd).st_size:
            raise ValueError(f"{nbytes} bytes of a file that has {os.fstat(fd).st_size}")
        libc = _libc()
        whole = align_up(nbytes) + HUGE_PAGE
        spare = libc.mmap(
            None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )
        if spare == _FAILED:
            raise _os_error()
        self.address = align_up(spare, HUGE_PAGE)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        # The reservation is given up from here on: the file lies over it, and its rest goes.
        if (
            libc.mmap(self.address, nbytes, writable, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            == _FAILED
        ):
            error = _os_error()
            libc.munmap(spare, whole)
            raise error
        end = self.address + align_up(nbytes)
        for start, stop in ((spare, self.address), (end, spare + whole)):
            if stop > start:
                libc.munmap(start, stop - start)
        # Only a class of its own has instances that a finalizer can be bound to.
        kind: Any = type("Mapped", (ctypes.c_char * nbytes,), {})
        memory = kind.from_address(self.address)
        # Not at exit: a thread may yet be copying, and the kernel unmaps what is left.
        weakref.finalize(memory, libc.munmap, self.address, nbytes).atexit = False
        self.view = memoryview(memory).cast("B")

    def madvise(self, option: int, start: int = 0, length: int = 0, /) -> None:
        """See `Advisable`; other threads run meanwhile, which is why this is not `mmap.mmap`."""
        if _libc().madvise(self.address + start, length or len(self.view) - start, option):
            raise _os_error()


def populate(memory: Advisable, start: int, nbytes: int) -> bool:
    """Bring pages in, changing no byte; return whether all are huge that can be by their place.

    Shared memory seldom gets huge pages by itself (`shmem_enabled` is "never" nearly everywhere),
    but may be collapsed into some where a page of each is there (MADV_COLLAPSE, Linux 6.1).
    """
    first, end = align_up(start, HUGE_PAGE), (start + nbytes) // HUGE_PAGE * HUGE_PAGE
    huge = first < end
    try:
        for at in range(first, end, HUGE_PAGE):
            memory.madvise(_MADV_POPULATE_WRITE, at, ALIGNMENT)
        if huge:
            memory.madvise(_MADV_COLLAPSE, first, end - first)
    except OSError:
        huge = False
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    return huge


def prefer_huge_pages(memory: Advisable, *span: int) -> bool:
    """Ask for transparent huge pages; return False where the kernel refuses.

    `span` is the start and the length, in bytes, of what they are for; all of it by default.
    """
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, *span)
    except (OSError, ValueError):
        return False
    return True


def secret_memory(secret: bytes) -> memoryview:
    """Return a copy of a secret in a page of its own: not swapped, where allowed, nor dumped.

    The page goes back to the kernel, which clears it, with the last view of it.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keep_from_dumps(page)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CDLL(None).mlock(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE))
    page[: len(secret)] = secret
    return memoryview(page)[: len(secret)]


def keep_from_dumps(memory: Advisable) -> None:
    """Leave memory out of core dumps, where the kernel can."""
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_DONTDUMP)


_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = address
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc


def _os_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
