"""Aligned memory and the one way to look at it: writable byte views, never copies."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

ALIGNMENT = 4096
"""Direct I/O wants addresses, offsets and lengths in multiples of this."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is >= `nbytes`."""
    return -(-nbytes // alignment) * alignment


def aligned_buffer(nbytes: int) -> memoryview:
    """Return zeroed private memory of at least `nbytes`, page-aligned, on huge pages if possible.

    The caller owns it; it is unmapped when the last view is gone.
    """
    return memoryview(private_memory(align_up(max(nbytes, 1))))[:nbytes]


def private_memory(nbytes: int) -> mmap.mmap:
    """Map memory that only this process sees, and no core dump: shared seldom gets huge pages."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(memory)
    keep_from_dumps(memory)
    return memory


def prefer_huge_pages(memory: mmap.mmap) -> bool:
    """Ask for transparent huge pages; return False where the kernel refuses."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
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


def keep_from_dumps(memory: mmap.mmap) -> None:
    """Leave memory out of core dumps, where the kernel can."""
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_DONTDUMP)
