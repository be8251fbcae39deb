"""The kernel that converts pages and portable blocks, beside the one that copies pages as they are.

Before it is timed, its bytes are compared with PyTorch's, from random pages and into poisoned ones.
Then blocks are loaded and saved as a connector does it, portable and as pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from statistics import median

import torch

from holdfast.devices.cuda.block_stage import BlockStage, opaque_stage, portable_stage
from holdfast.errors import HoldfastError
from holdfast.report import Row, not_measured, share
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.harness.paired_runs import Speed, paired, speed_row, timed
from holdfast_bench.measure.gpu.accelerator import HostAccelerator, Tensor
from holdfast_bench.measure.gpu.block_copies import BlockCopies
from holdfast_bench.measure.gpu.setting import Setting
from holdfast_bench.measure.gpu.shapes import BLOCK_TOKENS, FUSED_8B, FUSED_TOY, FusedShape

BLOCKS, TOY_BLOCKS = 64, 3
LAUNCHES = 10
KERNEL_GOAL, BLOCK_GOAL = 0.8, 0.95
POISON = 0xA5
SEED = 20_26
ROW_S = 3.0


class ConvertedPages:
    """Pages of one shape, a stage, and the launches between them: converted, or as they are."""

    def __init__(self, gpu: HostAccelerator, shape: FusedShape, blocks: int) -> None:
        self._gpu, self._shape, self._blocks = gpu, shape, blocks
        self.nbytes = blocks * shape.pages.block_bytes
        self._driver = gpu.driver()
        self._stream = self._driver.create_stream(urgent=False)
        self._end = self._driver.create_event()
        self.tensors = shape.pages.new_tensors(blocks, gpu.kind)
        self.stage = gpu.bytes(self.nbytes)
        pages = shape.pages.pages(self.tensors)
        self.portable = portable_stage(self._driver, pages, shape.portable)
        self.opaque = opaque_stage(self._driver, pages)
        self._entries = blocks * pages.pages_per_block
        order = torch.randperm(self._entries, generator=torch.Generator().manual_seed(SEED))
        self._order = order.to(gpu.kind)
        rows = torch.stack([order, torch.arange(self._entries)], 1).to(torch.int32)
        self._rows = gpu.pinned(8 * self._entries)
        self._rows.view(torch.int32).view(self._entries, 2).copy_(rows)

    def run(self, block: BlockStage, launches: int, *, to_pages: bool) -> float:
        """Copy all blocks some times; return the seconds until the end."""
        self._gpu.synchronise()
        begun_s = time.perf_counter()
        at = (self._rows.data_ptr(), self._entries, self.stage.data_ptr())
        for _ in range(launches):
            for work in block.launches(None, *at, to_pages=to_pages):
                self._driver.launch(work, self._stream)
        self._driver.record(self._end, self._stream)
        self._driver.synchronise(self._end)
        return time.perf_counter() - begun_s

    def verify(self) -> None:
        """Raise HoldfastError if the kernel converts other bytes than PyTorch, in any direction."""
        self.run(self.portable, 1, to_pages=False)
        if not torch.equal(self.stage, self._expected()):
            raise HoldfastError("the conversion fills a stage with other bytes")
        before = [tensor.clone() for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.fill_(POISON)
        self.run(self.portable, 1, to_pages=True)
        if not all(map(torch.equal, self.tensors, before)):
            raise HoldfastError("the conversion fills pages with other bytes")

    def close(self) -> None:
        """Close the driver."""
        self._driver.close()

    def _expected(self) -> Tensor:
        """Return portable blocks `[layer][k|v][head][token][byte]`, by PyTorch."""
        layers = []
        for tensor in self.tensors:
            rows = tensor[self._order].view(
                self._blocks, BLOCK_TOKENS, self._shape.heads, 2, 2 * self._shape.head_size
            )
            layers.append(rows.permute(0, 3, 2, 1, 4))
        return torch.stack(layers, 1).reshape(-1)


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the speed of both kernels, and of loads and saves of portable blocks."""
    shape, blocks = (FUSED_TOY, TOY_BLOCKS) if setting.rehearse else (FUSED_8B, BLOCKS)
    with closing(ConvertedPages(setting.gpu, shape, blocks)) as pages:
        pages.verify()
        for name, to_pages in (("pack", False), ("unpack", True)):
            limit, speed = (
                _gb_per_s(setting, pages, block, to_pages=to_pages)
                for block in (pages.opaque, pages.portable)
            )
            what = f"gpu.convert.{name}.{shape.model}"
            yield share(what, speed, "GB/s", limit, KERNEL_GOAL, gpu=setting.gpu.name())
    yield from _block_rows(setting, shape, blocks)


def _gb_per_s(
    setting: Setting, pages: ConvertedPages, block: BlockStage, *, to_pages: bool
) -> float:
    took_s = median(pages.run(block, LAUNCHES, to_pages=to_pages) for _ in range(setting.rounds))
    return 2 * LAUNCHES * pages.nbytes / took_s / GB


def _block_rows(setting: Setting, shape: FusedShape, blocks: int) -> Iterator[Row]:
    """Yield the speed of portable blocks, whose limit is that of the same pages as they are."""
    gpu = setting.gpu
    with (
        closing(
            BlockCopies(
                gpu,
                shape.pages,
                blocks,
                opens=lambda pages, tensors: gpu.device(pages, tensors, shape.portable),
            )
        ) as ours,
        closing(BlockCopies(setting.gpu, shape.pages, blocks)) as plain,
    ):
        ours.verify(blocks)
        for verb in ("load", "save"):
            what = f"gpu.{verb}.{shape.model}.{blocks}.portable"
            if setting.left_s() < ROW_S:
                yield not_measured(what, "no time was left")
                continue
            pairs = paired(
                setting.rounds, partial(_speed, ours, verb), partial(_gb_per_s_of, plain, verb)
            )
            yield speed_row(what, pairs, BLOCK_GOAL, blocks=blocks, gpu=setting.gpu.name())


def _speed(copies: BlockCopies, verb: str) -> Speed:
    """Load or save all blocks once."""
    work = copies.load if verb == "load" else copies.save
    moves = copies.moves(copies.blocks)
    return timed(copies.blocks * copies.shape.block_bytes, partial(work, moves))


def _gb_per_s_of(copies: BlockCopies, verb: str) -> float:
    return _speed(copies, verb).gb_per_s
