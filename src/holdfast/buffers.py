"""Aligned memory and the one way to look at it: writable byte views, never copies."""

from __future__ import annotations

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
    memory = mmap.mmap(-1, align_up(max(nbytes, 1)))
    prefer_huge_pages(memory)
    return memoryview(memory)[:nbytes]


def prefer_huge_pages(memory: mmap.mmap) -> bool:
    """Ask for transparent huge pages; return False where the kernel refuses."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError):
        return False
    return True
