"""Threads that all run before any work comes, so that none is left behind in a queue.

Their work goes straight into buffers that are somebody else's once the call is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import ConfigError


def workers(threads: int, name: str, begin: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Return a pool all of whose threads are running; each called `begin` first.

    A pool that has to make one when work comes, and can not, raises with that work in its queue:
    it would be done later, into buffers that are somebody else's by then. Raises ConfigError, also
    where `begin` raises.
    """
    met = threading.Barrier(threads + 1)
    failures: list[Exception] = []

    def first() -> None:
        try:
            if begin is not None:
                begin()
        except Exception as error:  # noqa: BLE001  # whatever it is: nobody may wait for this thread
            failures.append(error)
            met.abort()

    pool = ThreadPoolExecutor(threads, name, first)
    try:
        for _ in range(threads):
            pool.submit(met.wait)
        met.wait()
    except RuntimeError as error:
        met.abort()
        pool.shutdown()
        if failures:
            raise ConfigError(
                f"{name}: a thread could not begin ({failures[0]!r}); allow this process what it "
                "was refused"
            ) from failures[0]
        raise ConfigError(
            f"{name}: {threads} threads are more than this process may start ({error}); raise its "
            "limit of processes"
        ) from error
    return pool
