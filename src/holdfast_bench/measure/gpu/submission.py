"""What it costs to submit copies: one call for a batch or one for each copy; the lock of Python.

`.handovers`: calls of the driver, in a save or a load of 8 blocks, that give up the interpreter's
lock: beside a busy thread, each takes up to 5 ms to get it back. `switches` is how often the kernel
took the thread off its core meanwhile, beside a thread that holds the interpreter. `.call.`: the
calls of the driver that a save makes, each by itself.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import median
from typing import Any, cast

from holdfast.buffers import SharedMapping
from holdfast.devices.base import Device, Move, Pages, StagingDevice
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.cuda.libcuda import Tuning
from holdfast.devices.driver import Copies, Driver, Event
from holdfast.devices.registry import DeviceOptions
from holdfast.errors import HoldfastError
from holdfast.limits import KIB, MIB
from holdfast.report import Row, at_most, not_measured
from holdfast.tiers.arena import Arena
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.harness.paired_runs import busy_thread
from holdfast_bench.measure.gpu.accelerator import STEP_BLOCKS, HostAccelerator
from holdfast_bench.measure.gpu.arena_locks import ArenaLocks
from holdfast_bench.measure.gpu.block_copies import BlockCopies
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import LLAMA_8B, TOY

SIZES = ((64, 16 * MIB), (1024, 64 * KIB), (1024, 8 * KIB))
"""Copies of a batch, and the bytes of each: blocks, and pages of a layer."""

TOY_SIZES = ((8, 4 * KIB), (16, KIB))
BLOCKS = 8
CALLS = 20
WAITING = ("bounce", "synchronise", "register", "unregister")
"""Calls of a driver that wait without the interpreter's lock."""

SAVE_GOAL, LOAD_GOAL = 0, 1
ROW_S = 2.0
_POLL_S = 50e-6


class CountedDriver:
    """A driver whose calls are counted by their names."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls = Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._driver, name)

        def counted(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  # those of any call
            self._calls[name] += 1
            return call(*arguments, **named)

        return counted

    @property
    def waiting_calls(self) -> int:
        """Calls so far that gave up the interpreter's lock."""
        return sum(self._calls[name] for name in WAITING)


class BatchCopies:
    """A batch of copies of locked memory to the GPU, from places apart from each other."""

    def __init__(self, gpu: HostAccelerator, count: int, nbytes: int, tuning: Tuning) -> None:
        self.nbytes = count * nbytes
        self._driver = gpu.driver(tuning)
        self._arena = Arena(2 * self.nbytes)
        self._arena.populate(0, 2 * self.nbytes)
        mapped = SharedMapping(self._arena.fd, 2 * self.nbytes)
        self._locks = ArenaLocks(self._driver, mapped)
        self._on_gpu = gpu.bytes(self.nbytes)
        to = int(self._on_gpu.data_ptr())
        self._copies = Copies(
            [to + at * nbytes for at in range(count)],
            [mapped.address + 2 * at * nbytes for at in range(count)],
            [nbytes] * count,
        )
        self._mapped = mapped
        self._stream = self._driver.create_stream(urgent=False)
        self._end = self._driver.create_event()

    def run(self) -> tuple[float, float]:
        """Copy once; return the seconds of the call, and until the end."""
        begun_s = time.perf_counter()
        self._driver.copy(self._copies, self._stream, source_complete=True)
        called_s = time.perf_counter() - begun_s
        self._driver.record(self._end, self._stream)
        self._driver.synchronise(self._end)
        return called_s, time.perf_counter() - begun_s

    def close(self) -> None:
        """Unlock and release the memory."""
        self._locks.close()
        self._driver.close()
        self._arena.close()


def rows(setting: Setting) -> Iterator[Row]:
    """Yield hand-overs and calls of saves and loads, then batches in one call and in many."""
    yield from _handover_rows(setting)
    yield from _call_rows(setting)
    for count, nbytes in TOY_SIZES if setting.rehearse else SIZES:
        for name, batches in (("batch", True), ("loop", False)):
            what = f"gpu.submit.{count}x{nbytes // KIB}KiB.{name}"
            if setting.left_s() < ROW_S:
                yield not_measured(what, "no time was left")
                continue
            with closing(BatchCopies(setting.gpu, count, nbytes, Tuning(batches=batches))) as one:
                one.run()
                took = [one.run() for _ in range(setting.rounds)]
            called_us = 1e6 * median(called_s for called_s, _ in took)
            speed = one.nbytes / median(whole_s for _, whole_s in took) / GB
            more: dict[str, object] = {"us_of_the_call": called_us, "gpu": setting.gpu.name()}
            yield Row(what, speed, "GB/s", more)


def _handover_rows(setting: Setting) -> Iterator[Row]:
    """Yield how often a save and a load give up the interpreter's lock."""
    shape = TOY if setting.rehearse else LLAMA_8B
    driver = CountedDriver(setting.gpu.driver())

    def opens(pages: Pages, tensors: list[Any]) -> Device:
        counted = cast("Driver", driver)
        return CudaDevice(counted, pages, DeviceOptions(STEP_BLOCKS), tensors)

    with closing(BlockCopies(setting.gpu, shape, BLOCKS, opens=opens)) as copies:
        copies.verify(BLOCKS)
        for verb, goal, work in (("save", SAVE_GOAL, _save), ("load", LOAD_GOAL, _load)):
            calls, switches = list[int](), list[int]()
            with busy_thread():
                for _ in range(CALLS):
                    moves, before = copies.moves(BLOCKS), driver.waiting_calls
                    switches.append(work(copies, moves))
                    calls.append(driver.waiting_calls - before)
            more: dict[str, object] = {"switches": median(switches), "blocks": BLOCKS}
            yield at_most(f"gpu.{verb}.handovers", median(calls), "calls", goal, **more)


def _call_rows(setting: Setting) -> Iterator[Row]:
    """Yield the microseconds of each call, the median of many while the GPU has nothing to do."""
    with closing(setting.gpu.driver()) as driver:
        stream, kept = driver.create_stream(urgent=False), list[Event]()
        event = driver.create_event()
        driver.record(event, stream)
        driver.pause(stream)  # compiles its kernel
        calls: dict[str, Callable[[], object]] = {
            "engine_stream": driver.engine_stream,
            "new_event": lambda: kept.append(driver.create_event()),
            "event_again": lambda: driver.create_event() and None,
            "record": lambda: driver.record(event, stream),
            "query": lambda: driver.query(event),
            "launch": lambda: driver.pause(stream),
        }
        for name, work in calls.items():
            times = list[float]()
            for _ in range(CALLS):
                driver.synchronise(event)
                begun_s = time.perf_counter()
                work()
                times.append(time.perf_counter() - begun_s)
            yield Row(f"gpu.submit.call.{name}", 1e6 * median(times), "us")


def _save(copies: BlockCopies, moves: Sequence[Move]) -> int:
    """Save blocks as a connector does, which polls; return the switches of the thread's calls."""
    device = copies.device
    if not isinstance(device, StagingDevice):
        raise HoldfastError("this device has no stages")
    before = _switches()
    staged = device.stage([move.pages for move in moves])
    if staged is None:
        raise HoldfastError("the stages had no room for a batch")
    staged.pack()
    switches = _switches() - before
    while not staged.ready():
        time.sleep(_POLL_S)
    before = _switches()
    payloads = [(number, move.payload) for number, move in enumerate(moves)]
    transfer = staged.copy(copies.mapped, payloads, copies.locks)
    switches += _switches() - before
    while not transfer.done():
        time.sleep(_POLL_S)
    staged.release()
    return switches


def _load(copies: BlockCopies, moves: Sequence[Move]) -> int:
    """Load blocks; return the switches of the thread."""
    before = _switches()
    copies.load(moves)
    return _switches() - before


def _switches() -> int:
    """Return how often this thread has waited for something, such as the interpreter's lock."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
