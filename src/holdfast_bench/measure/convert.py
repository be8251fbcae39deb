"""Measure the conversion of pages and portable blocks: a thread beside a copy, a device beside one.

The blocks are those of a model like Llama 3.1 8B: 128 tokens, 32 layers, 8 KV heads of 128. A
thread's speed is bytes per second of its processor time; a device's is by the clock, with its two
threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from holdfast.blocks.layout import DTYPE_BYTES, Layout
from holdfast.buffers import SharedMapping, align_up
from holdfast.devices.arrange import Arrangement, Bytes, PortablePages
from holdfast.devices.base import Move, Pages
from holdfast.devices.host import HostDevice
from holdfast.devices.page_format import PageFormat, cpu_format, plain_format
from holdfast.devices.portable_host import PortableHostDevice
from holdfast.report import Row
from holdfast_bench.harness.hardware_limits import GB, SEED
from holdfast_bench.harness.paired_runs import Speed, busy_thread, paired, speed_row, timed

LAYERS, HEADS, TOKENS, SIZE = 32, 8, 128, 128
BATCH_BYTES = 128 << 20

AS_THEY_ARE = "a device that copies pages as they are"

GOALS = {"vec.bfloat16": 0.31, "vec.float32": 0.46, "amx.bfloat16": 0.11}
"""Least shares of a copy's speed: those of PyTorch's `copy_` between strided views, measured on a
core with AVX-512."""


class Packing(NamedTuple):
    """A page format of some engine, by its name in a row."""

    name: str
    form: PageFormat


def packings() -> Iterator[Packing]:
    """Yield what is measured: vLLM's formats on CPUs, and rows by token or by head."""
    for isa, dtype in (("vec", "bfloat16"), ("vec", "float32"), ("amx", "bfloat16")):
        form = cpu_format(isa, HEADS, TOKENS, SIZE, DTYPE_BYTES[dtype])
        yield Packing(f"{isa}.{dtype}", form)
    for order in ("nhd", "hnd"):
        form = plain_format(order, HEADS, TOKENS, (SIZE, SIZE), 2, fused=True)
        yield Packing(f"{order}.bfloat16", form)


def thread_rows(rounds: int) -> Iterator[Row]:
    """Yield the speed of one thread for each format and direction, beside a plain copy."""
    for name, form in packings():
        blocks = max(1, BATCH_BYTES // (LAYERS * form.page_bytes))
        pages: Bytes = np.ones((blocks, LAYERS, 1, form.page_bytes), np.uint8)
        payloads: Bytes = np.ones((blocks, LAYERS, form.page_bytes), np.uint8)
        arrangement = Arrangement(form, 1)
        page_bytes, payload_bytes = pages.reshape(-1), payloads.reshape(-1)
        save = partial(arrangement.to_blocks, pages, payloads)
        load = partial(arrangement.to_pages, payloads, pages)
        goal = GOALS.get(name)
        copy = partial(np.copyto, payload_bytes, page_bytes)
        yield _row(f"convert.{name}.save", rounds, pages.nbytes, (save, copy), goal)
        copy = partial(np.copyto, page_bytes, payload_bytes)
        yield _row(f"convert.{name}.load", rounds, pages.nbytes, (load, copy), goal)


def _row(
    what: str,
    rounds: int,
    nbytes: int,
    both: tuple[Callable[[], None], Callable[[], None]],
    goal: float | None,
) -> Row:
    """Compare a conversion with a copy of the same bytes, by the processor time of this thread."""
    ours, copy = both
    pairs = paired(rounds, lambda: _by_core(nbytes, ours), lambda: _by_core(nbytes, copy).gb_per_s)
    return speed_row(what, pairs, goal, limit_is="a plain copy")


def device_rows(rounds: int) -> Iterator[Row]:
    """Yield the speed of a device that converts, beside one that copies the same pages as they are.

    Blocks and pages are in random order. `busy`: beside a thread that holds the interpreter.
    """
    form = cpu_format("vec", HEADS, TOKENS, SIZE, 2)
    layout = Layout.portable(
        layers=LAYERS, kv_heads=HEADS, head_size=SIZE, dtype="bfloat16", block_tokens=TOKENS
    )
    count = BATCH_BYTES // layout.raw_bytes
    memory = np.ones((LAYERS, count, form.page_bytes), np.uint8)
    bases = tuple(layer.ctypes.data for layer in memory)
    pages = Pages.uniform(bases, form.page_bytes, form.page_bytes, count, 1)
    record = align_up(layout.raw_bytes + 144)
    arena = _shared_memory(count * record)
    order = np.random.default_rng(SEED)
    places, numbers = order.permutation(count).tolist(), order.permutation(count).tolist()
    moves = [
        Move(place * record + 128, [number]) for place, number in zip(places, numbers, strict=True)
    ]
    plain = HostDevice(pages, memory)
    portable = PortableHostDevice(pages, PortablePages(form, layout.whole()), memory)
    nbytes = count * layout.raw_bytes
    try:
        for what in ("save", "load"):

            def run(device: HostDevice | PortableHostDevice, what: str = what) -> Speed:
                call = device.gather if what == "save" else device.scatter
                return timed(nbytes, lambda: call(arena, moves).result())

            run(portable)
            pairs = paired(rounds, lambda: run(portable), lambda: run(plain).gb_per_s)
            yield speed_row(f"convert.device.{what}", pairs, None, limit_is=AS_THEY_ARE)
            with busy_thread():
                pairs = paired(rounds, lambda: run(portable), lambda: run(plain).gb_per_s)
            yield speed_row(f"convert.device.{what}.busy", pairs, None, limit_is=AS_THEY_ARE)
    finally:
        plain.close()
        portable.close()


def _shared_memory(nbytes: int) -> SharedMapping:
    """Return memory such as a node's arena, faulted in."""
    file = os.memfd_create("holdfast-bench")
    try:
        os.ftruncate(file, nbytes)
        memory = SharedMapping(file, nbytes)
    finally:
        os.close(file)
    np.frombuffer(memory.view, np.uint8).fill(1)
    return memory


def _by_core(nbytes: int, work: Callable[[], None]) -> Speed:
    start_s = time.thread_time()
    work()
    spent_s = time.thread_time() - start_s
    return Speed(nbytes / spent_s / GB, spent_s / nbytes * GB)
