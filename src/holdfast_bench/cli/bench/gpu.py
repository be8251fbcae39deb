"""`holdfast bench gpu`: blocks between an arena and an engine's pages in GPU memory.

The limit is one copy of as many bytes between page-locked memory and the GPU. `call_ms`: how long a
save keeps the engine's thread. `.busy`: beside a thread that holds the interpreter. Before and
after, blocks are saved, cleared and loaded, and every byte is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from holdfast.buffers import SharedMapping
from holdfast.devices.base import DirectDevice, Move, Pages
from holdfast.errors import ConfigError, HoldfastError
from holdfast.limits import MIB
from holdfast.report import Row
from holdfast.tiers.arena import Arena
from holdfast_bench.cli import measuring
from holdfast_bench.cli.progress import Steps
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.harness.paired_runs import Speed, busy_thread, paired, speed_row, timed

ALSO = ("block_mib", "call_ms", "gpu")

BLOCKS = (1, 8, 64)
"""Blocks of a batch: up to 8K tokens at 128 per block."""

BUSY_BLOCKS = 8
"""Blocks of a batch beside a busy thread, which takes seconds."""

POOL_BLOCKS = 4 * BLOCKS[-1]
"""Slots of the arena; batches use them in random order, so that no cache holds a batch."""

SEED = 20_26


class PageShape(NamedTuple):
    """Pages of a public model in bfloat16, 128 tokens in a block."""

    model: str
    layers: int
    page_bytes: int
    pages_per_block: int


SHAPES = (
    PageShape("llama-3.1-8b", layers=32, page_bytes=16 * 2 * 8 * 128 * 2, pages_per_block=8),
    PageShape("deepseek-v3", layers=61, page_bytes=64 * 576 * 2, pages_per_block=2),
)
"""Keys and values of 8 heads of 128, in pages of 16 tokens; latents of 576, in pages of 64."""


class _Bench:
    """Pages of one shape on the GPU, the device for them, and an arena with slots for blocks."""

    def __init__(self, shape: PageShape) -> None:
        import torch

        from holdfast.devices.cuda.torch_device import TorchDevice

        count = BLOCKS[-1] * shape.pages_per_block
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret
        self._pages: Any = torch.randint(
            0, 256, (shape.layers, count, shape.page_bytes), dtype=torch.uint8, device="cuda"
        )
        layers = list(self._pages)
        self.shape = Pages.uniform(
            tuple(layer.data_ptr() for layer in layers),
            shape.page_bytes,
            shape.page_bytes,
            count,
            shape.pages_per_block,
        )
        self.block_bytes = self.shape.payload_bytes
        self.device: DirectDevice = TorchDevice(layers, self.shape)
        self._locked: Any = torch.empty(
            BLOCKS[-1] * self.block_bytes, dtype=torch.uint8, pin_memory=True
        )
        self._on_gpu: Any = torch.empty_like(self._locked, device="cuda")
        self._arena = Arena(POOL_BLOCKS * self.block_bytes)
        for at in range(0, self._arena.nbytes, self.block_bytes):
            self._arena.populate(at, self.block_bytes)
        self._mapped = SharedMapping(self._arena.fd, self._arena.nbytes)
        self.call_s: list[float] = []

    def close(self) -> None:
        self.device.close()
        self._arena.close()

    def moves(self, blocks: int) -> list[Move]:
        """Return copies of that many blocks, with slots and pages in random order."""
        ids = self._random.sample(range(self.shape.pages), blocks * self.shape.pages_per_block)
        slots = self._random.sample(range(POOL_BLOCKS), blocks)
        size = self.shape.pages_per_block
        return [
            Move(slot * self.block_bytes, ids[at * size : (at + 1) * size])
            for at, slot in enumerate(slots)
        ]

    def save(self, moves: list[Move]) -> None:
        """Save a batch; note how long the call kept its caller, the engine."""
        begun = time.perf_counter()
        transfer = self.device.gather(self._mapped, moves)
        self.call_s.append(time.perf_counter() - begun)
        self._check(transfer.result())

    def load(self, moves: list[Move]) -> None:
        """Load a batch."""
        self._check(self.device.scatter(self._mapped, moves, self.device.mark()).result())

    def verify(self, blocks: int) -> None:
        """Save and load a batch; raise HoldfastError if any byte of the pages has changed."""
        import torch

        self._pages.random_(0, 256)
        before, moves = self._pages.clone(), self.moves(blocks)
        self.save(moves)
        for move in moves:
            self._pages[:, list(move.pages)] = 0
        self.load(moves)
        if not torch.equal(self._pages, before):
            raise HoldfastError(f"{blocks} blocks came back with other bytes")

    def limit_gb_per_s(self, nbytes: int, *, to_gpu: bool) -> float:
        """Return the speed of one copy of `nbytes` between page-locked and GPU memory."""
        import torch

        locked, on_gpu = self._locked[:nbytes], self._on_gpu[:nbytes]
        to, source = (on_gpu, locked) if to_gpu else (locked, on_gpu)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return float(nbytes / (time.perf_counter() - begun) / GB)

    @staticmethod
    def _check(copied: bool) -> None:  # noqa: FBT001  # a result
        if not copied:
            raise HoldfastError("a batch was not copied whole; the log says why")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subject."""
    measuring.add_rounds_argument(parser, 15)
    measuring.add_quick_argument(parser, f"the first shape only, {measuring.ROUNDS_MIN} rounds")


def measure(args: argparse.Namespace, steps: Steps) -> Iterator[Row]:
    """Yield a row for the loads and one for the saves of each shape and size of batch."""
    if find_spec("torch") is None:
        raise ConfigError("torch is not installed here; install the engine's build for CUDA")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("this machine has no GPU that torch can use; run it where an engine does")
    rounds = measuring.ROUNDS_MIN if args.quick else args.rounds
    for shape in SHAPES[:1] if args.quick else SHAPES:
        steps.update(f"blocks of {shape.model} ...")
        with contextlib.closing(_Bench(shape)) as bench:
            for blocks in BLOCKS:
                bench.verify(blocks)
                for verb in ("load", "save"):
                    yield _row(bench, f"gpu.{verb}.{shape.model}.{blocks}", verb, blocks, rounds)
            with busy_thread():
                for verb in ("load", "save"):
                    what = f"gpu.{verb}.{shape.model}.{BUSY_BLOCKS}.busy"
                    yield _row(bench, what, verb, BUSY_BLOCKS, measuring.ROUNDS_MIN)
            bench.verify(BLOCKS[-1])


def _row(bench: _Bench, what: str, verb: str, blocks: int, rounds: int) -> Row:
    import torch

    nbytes = blocks * bench.block_bytes
    move: Callable[[list[Move]], None] = bench.load if verb == "load" else bench.save
    bench.call_s.clear()

    def ours() -> Speed:
        return timed(nbytes, partial(move, bench.moves(blocks)))

    def limit() -> float:
        return bench.limit_gb_per_s(nbytes, to_gpu=verb == "load")

    pairs = paired(rounds, ours, limit)
    called = {"call_ms": 1e3 * statistics.median(bench.call_s)} if bench.call_s else {}
    return speed_row(
        what,
        pairs,
        None,
        blocks=blocks,
        block_mib=bench.block_bytes / MIB,
        gpu=torch.cuda.get_device_name(),
        **called,
    )
