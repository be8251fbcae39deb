"""Phase 2: what it takes to lock memory, and what it does to others.

A GPU's driver pins pages under locks that all its users share. `.stall`: the longest launch of
another thread, and of another process, while 2 GiB are locked and unlocked 64 MiB a call, with
pauses of four times a call's duration.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.buffers import Registrar, SharedMapping
from holdfast.limits import GIB, KIB, MIB
from holdfast.report import Row, at_most, not_measured
from holdfast.tiers.arena import Arena
from holdfast.wire.local.locked_memory import PAUSE_TIMES
from holdfast_bench.harness.process import start_owned
from holdfast_bench.measure.gpu.launching import LaunchLoop, LongLaunch, longest_ms
from holdfast_bench.measure.gpu.setting import Setting

CHUNK_BYTES, TOY_CHUNK_BYTES = 64 * MIB, 64 * KIB
LARGE_BYTES, TOY_LARGE_BYTES = GIB, 256 * KIB
ALL_BYTES, TOY_ALL_BYTES = 2 * GIB, MIB
STALL_GOAL_MS = 5.0
KERNEL_S, TOY_KERNEL_S = 0.4, 0.01
PROCESS = "holdfast_bench.measure.gpu.launching"


class _Sizes(NamedTuple):
    chunk: int
    large: int
    all: int
    kernel_s: float


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the time of calls, on huge and on small pages, and the stalls of others."""
    sizes = _Sizes(CHUNK_BYTES, LARGE_BYTES, ALL_BYTES, KERNEL_S)
    if setting.rehearse:
        sizes = _Sizes(TOY_CHUNK_BYTES, TOY_LARGE_BYTES, TOY_ALL_BYTES, TOY_KERNEL_S)
    driver = setting.gpu.driver()
    arena = Arena(sizes.all)
    arena.populate(0, sizes.all)
    small = os.memfd_create("small pages", os.MFD_CLOEXEC)
    try:
        mapped = SharedMapping(arena.fd, sizes.all)
        for name, nbytes in (("chunk", sizes.chunk), ("large", sizes.large)):
            yield from _call_rows(setting, driver, mapped.address, nbytes, f"{name}.huge_pages")
        os.ftruncate(small, sizes.chunk)
        on_small = SharedMapping(small, sizes.chunk)
        np.frombuffer(on_small.view, np.uint8)[:] = 1
        yield from _call_rows(setting, driver, on_small.address, sizes.chunk, "chunk.small_pages")
        yield _beside_kernel(setting, driver, mapped.address, sizes)
        yield from _stall_rows(setting, driver, mapped.address, sizes)
    finally:
        os.close(small)
        arena.close()
        driver.close()


def _call_rows(
    setting: Setting, driver: Registrar, address: int, nbytes: int, name: str
) -> Iterator[Row]:
    """Yield the median time of locking and of unlocking some memory in one call."""
    locked_s, unlocked_s = list[float](), list[float]()
    for _ in range(setting.rounds):
        locked_s.append(_seconds(lambda: driver.register(address, nbytes)))
        unlocked_s.append(_seconds(lambda: driver.unregister(address)))
    mib, gpu = nbytes / MIB, setting.gpu.name()
    yield at_most(f"gpu.lock.{name}", 1e3 * median(locked_s), "ms", mib=mib, gpu=gpu)
    yield at_most(f"gpu.unlock.{name}", 1e3 * median(unlocked_s), "ms", mib=mib, gpu=gpu)


def _beside_kernel(setting: Setting, driver: Registrar, address: int, sizes: _Sizes) -> Row:
    """Return the time of unlocking a chunk while a kernel runs."""
    driver.register(address, sizes.chunk)
    setting.gpu.occupy(sizes.kernel_s)
    took_s = _seconds(lambda: driver.unregister(address))
    setting.gpu.synchronise()
    return at_most("gpu.unlock.beside_kernel", 1e3 * took_s, "ms", kernel_s=sizes.kernel_s)


def _stall_rows(setting: Setting, driver: Registrar, address: int, sizes: _Sizes) -> Iterator[Row]:
    """Yield the longest launches of a thread and of a process, while locking and unlocking."""
    loop = LaunchLoop(setting.gpu)
    chunks = range(address, address + sizes.all, sizes.chunk)
    with _other_process(setting) as launches_of_process:
        loop.start()
        begun_s = time.monotonic()
        _with_pauses(lambda at: driver.register(at, sizes.chunk), chunks)
        locked_s = time.monotonic()
        _with_pauses(driver.unregister, chunks)
        unlocked_s = time.monotonic()
        found = {"thread": loop.stop(), "process": launches_of_process()}
    for who, launches in found.items():
        for name, from_s, to_s in (
            ("lock", begun_s, locked_s),
            ("unlock", locked_s, unlocked_s),
        ):
            what = f"gpu.{name}.stall.{who}"
            if launches is None:
                yield not_measured(what, "the other process ended early")
                continue
            longest = longest_ms(launches, from_s, to_s)
            yield at_most(what, longest, "ms", STALL_GOAL_MS, seconds=to_s - from_s)


def _with_pauses(call: Callable[[int], object], chunks: range) -> None:
    """Call with each address, and pause after each call, as an engine does."""
    for address in chunks:
        time.sleep(PAUSE_TIMES * _seconds(lambda address=address: call(address)))  # type: ignore[misc]


@contextmanager
def _other_process(setting: Setting) -> Iterator[Callable[[], list[LongLaunch] | None]]:
    """Run a process that launches kernels; yield a call that ends it and returns long launches."""
    argv = [sys.executable, "-m", PROCESS, *(["--rehearse"] if setting.rehearse else [])]
    process = start_owned(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ended() -> list[LongLaunch] | None:
        said, _ = process.communicate(timeout=max(1.0, setting.left_s()))
        return msgspec.json.decode(said, type=list[LongLaunch]) if said else None

    with process:
        try:
            if process.stdout is not None:
                process.stdout.readline()
            yield ended
        finally:
            process.kill()


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s
