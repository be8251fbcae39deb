"""Phase 3: the kernel between pages and a stage, beside a copy of as many bytes within the GPU.

Before it is timed, its bytes are compared with PyTorch's, from random pages and into poisoned ones.
Speeds count bytes that are read and bytes that are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import gcd
from statistics import median

import torch

from holdfast.devices.cuda.libcuda import TUNING, Tuning
from holdfast.devices.driver import PageCopy, PageTable
from holdfast.errors import HoldfastError
from holdfast.report import Row, at_most, not_measured, share
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.measure.gpu.accelerator import HostAccelerator
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import SHAPES, TOY, PageShape

BLOCKS, TOY_BLOCKS = 64, 3
LAUNCHES = 10
"""Launches of one figure: the GPU's work is longer than the calls for it."""

POISON = 0xA5
SEED = 20_26
ROW_S = 2.0

TUNINGS = [Tuning(programs, warps) for warps in (4, 8) for programs in (132, 264, 528, 1056)]
"""Numbers of programs and warps that are compared: 1 to 8 programs for each multiprocessor."""

TUNED_ROUNDS = 3


class KernelPages:
    """Pages and a stage of one shape, and the kernel between them.

    `rows_on_gpu`: the kernel reads page numbers from the GPU's memory, not from locked memory.
    """

    def __init__(
        self,
        gpu: HostAccelerator,
        shape: PageShape,
        blocks: int,
        *,
        rows_on_gpu: bool = False,
        tuning: Tuning = TUNING,
    ) -> None:
        self._gpu, self._shape, self._blocks = gpu, shape, blocks
        self.nbytes = blocks * shape.block_bytes
        self._driver = gpu.driver(tuning)
        self._stream, self._end = (
            self._driver.create_stream(urgent=False),
            self._driver.create_event(),
        )
        self._tensors = shape.new_tensors(blocks, gpu.kind)
        self._stage, self._other = gpu.bytes(self.nbytes), gpu.bytes(self.nbytes)
        bases = [int(tensor.data_ptr()) for tensor in self._tensors]
        self._bases = torch.tensor(bases, dtype=torch.int64, device=gpu.kind)
        aligned = gcd(16, shape.page_bytes, *bases)
        table = PageTable(
            self._bases.data_ptr(), len(bases), shape.page_bytes, shape.page_bytes, aligned
        )
        entries = blocks * shape.pages_per_block
        order = torch.randperm(entries, generator=torch.Generator().manual_seed(SEED))
        self._pages = order.to(gpu.kind)
        rows = torch.stack([order, torch.arange(entries)], 1).to(torch.int32)
        self._rows = gpu.bytes(8 * entries) if rows_on_gpu else gpu.pinned(8 * entries)
        self._rows.view(torch.int32).view(entries, 2).copy_(rows)
        self._works = {
            to_pages: PageCopy(
                table, self._rows.data_ptr(), entries, self._stage.data_ptr(), shape.block_bytes,
                shape.pages_per_block, to_pages,
            )
            for to_pages in (False, True)
        }  # fmt: skip

    def run(self, launches: int, *, to_pages: bool) -> tuple[float, float]:
        """Launch the kernel some times; return the seconds of the calls and of everything."""
        self._gpu.synchronise()
        begun_s = time.perf_counter()
        for _ in range(launches):
            self._driver.launch(self._works[to_pages], self._stream)
        called_s = time.perf_counter() - begun_s
        self._driver.record(self._end, self._stream)
        self._driver.synchronise(self._end)
        return called_s, time.perf_counter() - begun_s

    def copied_within_s(self, copies: int) -> float:
        """Return the seconds of plain copies of as many bytes in the GPU's memory."""

        def work() -> None:
            for _ in range(copies):
                self._other.copy_(self._stage)

        return self._gpu.seconds(work)

    def verify(self) -> None:
        """Raise HoldfastError if the kernel copies other bytes than PyTorch, in any direction."""
        self.run(1, to_pages=False)
        shape = (self._blocks, len(self._tensors), self._shape.pages_per_block, -1)
        staged = self._stage.view(shape)
        expected = [tensor[self._pages].view(shape[0], *shape[2:]) for tensor in self._tensors]
        if not all(torch.equal(staged[:, at], each) for at, each in enumerate(expected)):
            raise HoldfastError(f"{self._shape.model}: the kernel fills a stage with other bytes")
        before = [tensor.clone() for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.fill_(POISON)
        self.run(1, to_pages=True)
        if not all(map(torch.equal, self._tensors, before)):
            raise HoldfastError(f"{self._shape.model}: the kernel fills pages with other bytes")

    def close(self) -> None:
        """Close the driver."""
        self._driver.close()


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the speed of each shape and direction, and the time of one call."""
    gpu, blocks = setting.gpu, TOY_BLOCKS if setting.rehearse else BLOCKS
    shapes = (TOY,) if setting.rehearse else SHAPES
    for shape in shapes:
        for rows_on_gpu in (False, True) if shape is shapes[0] else (False,):
            ending = ".rows_on_gpu" if rows_on_gpu else ""
            if setting.left_s() < ROW_S:
                yield not_measured(f"gpu.kernel.{shape.model}{ending}", "no time was left")
                continue
            pages = KernelPages(gpu, shape, blocks, rows_on_gpu=rows_on_gpu)
            try:
                yield from _rows(setting, pages, shape.model, ending)
            finally:
                pages.close()
    for tuning in TUNINGS[: 2 if setting.rehearse else None]:
        yield from _tuned_rows(setting, shapes[0], blocks, tuning)


def _tuned_rows(setting: Setting, shape: PageShape, blocks: int, tuning: Tuning) -> Iterator[Row]:
    """Yield the speeds of a kernel with other numbers of programs and warps than Holdfast's."""
    ending = f".{tuning.programs_max}x{tuning.warps}"
    if setting.left_s() < ROW_S:
        yield not_measured(f"gpu.kernel.{shape.model}{ending}", "no time was left")
        return
    pages = KernelPages(setting.gpu, shape, blocks, tuning=tuning)
    try:
        pages.verify()
        for name, to_pages in (("pack", False), ("unpack", True)):
            timed = [pages.run(LAUNCHES, to_pages=to_pages)[1] for _ in range(TUNED_ROUNDS)]
            speed = _gb_per_s(pages, median(timed))
            more: dict[str, object] = {"programs": tuning.programs_max, "warps": tuning.warps}
            yield Row(f"gpu.kernel.{name}.{shape.model}{ending}", speed, "GB/s", more)
    finally:
        pages.close()


def _rows(setting: Setting, pages: KernelPages, model: str, ending: str) -> Iterator[Row]:
    pages.verify()
    gpu = setting.gpu.name()
    limit = _gb_per_s(pages, median(pages.copied_within_s(LAUNCHES) for _ in range(setting.rounds)))
    for name, to_pages in (("pack", False), ("unpack", True)):
        timed = [pages.run(LAUNCHES, to_pages=to_pages) for _ in range(setting.rounds)]
        speed = _gb_per_s(pages, median(whole_s for _, whole_s in timed))
        yield share(f"gpu.kernel.{name}.{model}{ending}", speed, "GB/s", limit, gpu=gpu)
    call_us = 1e6 * median(called_s for called_s, _ in timed) / LAUNCHES
    yield at_most(f"gpu.kernel.call.{model}{ending}", call_us, "us", gpu=gpu)


def _gb_per_s(pages: KernelPages, seconds: float) -> float:
    return 2 * LAUNCHES * pages.nbytes / seconds / GB
