"""Keep what a process has loaded out of garbage collections, which stop every thread meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Have collections look only at what is made from here on, until the end.

    A full one over all that is imported took 12 ms, in which no request of any domain moved: the
    99th percentile of fetches of 40 ms. For processes of our own, never for an engine's.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
