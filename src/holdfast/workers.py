"""Thread pools that start all threads at once, so that no work stays in a queue without a thread.

The work writes to buffers that the caller reuses after the call, so it must not run later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from holdfast.errors import ConfigError

A = TypeVar("A")
T = TypeVar("T")


def workers(threads: int, name: str, begin: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Return a pool all of whose threads are running; each called `begin` first.

    If a `ThreadPoolExecutor` cannot start a thread, `submit` raises but keeps the work in its
    queue: the work would run later, on buffers that the caller has reused. Raises ConfigError if a
    thread cannot be started or `begin` raises.
    """
    all_running = threading.Barrier(threads + 1)
    failures: list[Exception] = []

    def first() -> None:
        try:
            if begin is not None:
                begin()
        except Exception as error:  # noqa: BLE001  # on any error the barrier must be released
            failures.append(error)
            all_running.abort()

    pool = ThreadPoolExecutor(threads, name, first)
    try:
        for _ in range(threads):
            pool.submit(all_running.wait)
        all_running.wait()
    except RuntimeError as error:
        all_running.abort()
        pool.shutdown()
        if failures:
            raise ConfigError(
                f"{name}: a thread could not begin ({failures[0]!r}); give this process the "
                "permission that it lacks"
            ) from failures[0]
        raise ConfigError(
            f"{name}: {threads} threads are more than this process may start ({error}); raise its "
            "limit of processes"
        ) from error
    return pool


def parallel(
    work: Callable[[A], T], arguments: Sequence[A], beside: ThreadPoolExecutor | None
) -> list[T]:
    """Call `work` for all arguments at once, the first in this thread; return when all have ended.

    Without a pool, and at the interpreter's exit, when pools accept no work, all calls are made in
    this thread. After an error too, no call is in progress.
    """
    if beside is None:
        return [work(argument) for argument in arguments]
    others: list[Future[T]] = []
    try:
        with contextlib.suppress(RuntimeError):  # the pool accepts no more work
            others += (beside.submit(work, argument) for argument in arguments[1:])
        done = [work(argument) for argument in arguments[:1]]
        for argument, future in zip(arguments[1:], others, strict=False):
            done.append(work(argument) if future.cancel() else future.result())
        return done + [work(argument) for argument in arguments[1 + len(others) :]]
    finally:
        wait([future for future in others if not future.cancel()])


def submit_or_run(
    pool: ThreadPoolExecutor | None, work: Callable[[A], T], argument: A
) -> Future[T]:
    """Run work in a pool, or in this thread if there is no pool or it accepts no more work.

    At the interpreter's exit no pool accepts work.
    """
    try:
        if pool is None:
            raise RuntimeError("there is no pool")
        return pool.submit(work, argument)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(work(argument))
        except Exception as error:  # noqa: BLE001  # the caller gets it with the result
            done.set_exception(error)
        return done
