"""Exclude the objects of a process's start from garbage collections, which stop every thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all present objects from garbage collections, until the end of the `with` block.

    A full collection over all imported modules took 12 ms, in which every request waited; it set
    the 99th percentile of fetches of 40 ms. For Holdfast's own processes, never for an engine's.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
