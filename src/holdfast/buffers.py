"""Aligned and shared memory, accessed by writable byte views without copies."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import resource
import weakref
from abc import abstractmethod
from pathlib import Path
from typing import Any, Protocol

ALIGNMENT = 4096
"""Direct I/O requires addresses, offsets and lengths that are multiples of this, in bytes."""

HUGE_PAGE = 2 << 20
"""Bytes of a transparent huge page on x86-64, and on other processors with 4 KiB pages."""

_COREDUMP_FILTER = Path("/proc/self/coredump_filter")
_DUMP_ELF_HEADERS = 0x10
"""Bit of the filter for the first page of ELF files; the other bits are kinds of memory."""

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is >= `nbytes`."""
    return -(-nbytes // alignment) * alignment


def aligned_buffer(nbytes: int) -> memoryview:
    """Return zeroed private memory of at least `nbytes`, page-aligned, on huge pages if possible.

    The caller owns it; it is unmapped when the last view is gone. A buffer of at least `HUGE_PAGE`
    starts at a huge page boundary, which the kernel does not guarantee for other lengths than
    multiples of `HUGE_PAGE`. Bytes after the last whole huge page are on small pages.
    """
    if nbytes < HUGE_PAGE:
        return memoryview(private_memory(align_up(max(nbytes, 1))))[:nbytes]
    memory = _private(align_up(nbytes) + HUGE_PAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    prefer_huge_pages(memory, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    return memoryview(memory)[start : start + nbytes]


def private_memory(nbytes: int) -> mmap.mmap:
    """Map private anonymous memory, on huge pages if possible and not in core dumps."""
    memory = _private(nbytes)
    prefer_huge_pages(memory)
    return memory


def _private(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keep_from_dumps(memory)
    return memory


class Advisable(Protocol):
    """Mapped memory with a `madvise` method, such as `mmap.mmap`."""

    def madvise(self, option: int, start: int = 0, length: int = 0, /) -> None:
        """Advise the kernel, by default about all of the memory; raise OSError if it refuses."""
        ...


class _Mapping:
    """Memory mapped at `address`; unlike that of `mmap.mmap`, its `madvise` releases the GIL."""

    address: int
    view: memoryview

    def madvise(self, option: int, start: int = 0, length: int = 0, /) -> None:
        """See `Advisable`."""
        if c_library().madvise(self.address + start, length or len(self.view) - start, option):
            raise last_error()


class PrivateMapping(_Mapping):
    """Memory like that of `private_memory`; unmapped when the last view of `view` is gone."""

    def __init__(self, nbytes: int) -> None:
        memory = private_memory(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.view = memoryview(memory)


class SharedMapping(_Mapping):
    """A shared mapping of a file, at a multiple of `HUGE_PAGE`, as huge pages require.

    The caller keeps the descriptor. The file is unmapped when the last view of `view` is gone.
    Raises OSError, and ValueError if the file is shorter than `nbytes`, because an access past
    its end kills the process (SIGBUS).
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        if not 0 < nbytes <= os.fstat(fd).st_size:
            raise ValueError(f"{nbytes} bytes of a file of {os.fstat(fd).st_size} bytes")
        self.nbytes = nbytes
        libc = c_library()
        whole = align_up(nbytes) + HUGE_PAGE
        reserved = libc.mmap(
            None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )
        if reserved == _FAILED:
            raise last_error()
        self.address = align_up(reserved, HUGE_PAGE)
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        # The file replaces part of the reserved range; the rest of the range is unmapped below.
        if (
            libc.mmap(self.address, nbytes, writable, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            == _FAILED
        ):
            error = last_error()
            libc.munmap(reserved, whole)
            raise error
        end = self.address + align_up(nbytes)
        for start, stop in ((reserved, self.address), (end, reserved + whole)):
            if stop > start:
                libc.munmap(start, stop - start)
        # A finalizer can be bound to an instance of a subclass of the array type only.
        kind: Any = type("Mapped", (ctypes.c_char * nbytes,), {})
        memory = kind.from_address(self.address)
        self._unmap = weakref.finalize(memory, libc.munmap, self.address, nbytes)
        # Not at exit: a thread may still be copying, and the kernel unmaps the file then.
        self._unmap.atexit = False
        self.view = memoryview(memory).cast("B")

    def keep_from_children(self) -> None:
        """Leave the mapping out of processes that are forked from now on; raises OSError.

        An access there ends the process. So a child does not keep memory that a device uses, and
        its first write to a page does not replace the page of its parent.
        """
        self.madvise(mmap.MADV_DONTFORK)
        # A forked child may have other memory at this address.
        unmapping = self._unmap.detach()
        if unmapping is not None:
            memory, _, _, _ = unmapping
            self._unmap = weakref.finalize(
                memory, _unmap_in, os.getpid(), self.address, self.nbytes
            )
            self._unmap.atexit = False

    def give_up_copy(self) -> None:
        """Replace the mapping of the file by private zeroed memory; views of it stay valid.

        Raises OSError if the kernel refuses.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        writable, nbytes = mmap.PROT_READ | mmap.PROT_WRITE, align_up(len(self.view))
        if c_library().mmap(self.address, nbytes, writable, flags, -1, 0) == _FAILED:
            raise last_error()


def _unmap_in(process: int, address: int, nbytes: int) -> None:
    """Unmap memory of a process; do nothing in another one, such as a forked child."""
    if os.getpid() == process:
        c_library().munmap(address, nbytes)


class Registrar(Protocol):
    """Page-locks memory of this process for copies of a device. Any exception means failure.

    Threads call it one after the other, so a driver that keeps state per thread sets it each time.
    """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Lock memory, which stays mapped until `unregister`; a failed call locks nothing.

        Takes milliseconds.
        """

    @abstractmethod
    def unregister(self, address: int) -> None:
        """End the lock that began at `address`, which no copy uses. Waits for the GPU's work."""


def populate(memory: Advisable, start: int, nbytes: int) -> bool:
    """Populate pages without changing a byte; return whether every possible huge page is huge.

    Most systems give shared memory no huge pages by default (`shmem_enabled` is "never"), but
    MADV_COLLAPSE (Linux 6.1) makes one of every aligned range with at least one populated page.
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


def prefer_huge_pages(memory: Advisable, *span: int) -> None:
    """Ask for transparent huge pages, which the kernel may refuse.

    `span`: start and length in bytes of the range; by default all of the memory.
    """
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE, *span)


def secret_memory(secret: bytes) -> memoryview:
    """Return a copy of a secret in a page of its own, locked if allowed, not in core dumps.

    With the last view, the page returns to the kernel, which clears it.
    """
    page = _private(mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CDLL(None).mlock(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE))
    page[: len(secret)] = secret
    return memoryview(page)[: len(secret)]


def keep_from_dumps(memory: Advisable) -> None:
    """Leave memory out of core dumps, if the kernel can."""
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_DONTDUMP)


def keep_memory_from_dumps() -> None:
    """Leave all memory of this process, and of its later children, out of core dumps.

    For Holdfast's own processes: Python copies secrets on its heap, where they cannot be marked one
    by one. A dump then has the ELF headers and the registers of the threads. If the kernel has no
    filter, the size of a dump is limited to 0. Raises OSError if neither is possible.
    """
    try:
        _COREDUMP_FILTER.write_text(f"{_DUMP_ELF_HEADERS:#x}\n", "ascii")
    except OSError:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def c_library() -> ctypes.CDLL:
    """Return the C library; a call releases the GIL and sets the error of `last_error`."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = address
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc


def last_error() -> OSError:
    """Return the error of this thread's last failed call of `c_library`."""
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
