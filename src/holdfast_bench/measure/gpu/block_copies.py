"""Saves and loads of blocks between an engine's pages and an arena, as a connector makes them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from holdfast.buffers import SharedMapping
from holdfast.devices.base import (
    Device,
    DirectDevice,
    LockedRanges,
    Move,
    Pages,
    StagedBlocks,
    StagingDevice,
)
from holdfast.errors import HoldfastError
from holdfast.tiers.arena import Arena
from holdfast_bench.measure.gpu.accelerator import HostAccelerator
from holdfast_bench.measure.gpu.shapes import PageShape

SEED = 20_26
POOL = 3
"""Slots of the arena, in times of the largest batch: no cache of the processor holds a batch."""

SPIN_S = 0.001
"""Time for which the end of a kernel is looked for without a rest: a rest gives up the GIL."""

_POLL_S = 50e-6


def save(
    device: Device, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
) -> float:
    """Save whole blocks; return how long the call kept the engine's thread, in seconds.

    Raises HoldfastError if they were not copied whole.
    """
    begun_s = time.perf_counter()
    if not isinstance(device, StagingDevice):
        transfer = cast("DirectDevice", device).gather(arena, moves)
        called_s = time.perf_counter() - begun_s
        check_copied(copied=transfer.result())
        return called_s
    staged = device.stage([move.pages for move in moves])
    if staged is None:
        raise HoldfastError("the stages had no room for a batch")
    staged.pack()
    called_s = time.perf_counter() - begun_s
    try:
        _wait_ready(staged)
        payloads = [(number, move.payload) for number, move in enumerate(moves)]
        check_copied(copied=staged.copy(arena, payloads, locks).result())
    finally:
        staged.release()
    return called_s


def load(
    device: Device, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
) -> None:
    """Load blocks; raise HoldfastError if they were not copied whole."""
    check_copied(copied=device.scatter(arena, moves, device.mark(), locks).result())


def check_copied(*, copied: bool) -> None:
    """Raise HoldfastError if a batch was not copied whole."""
    if not copied:
        raise HoldfastError("a batch was not copied whole; the log says why")


class BlockCopies:
    """Pages of one shape for `blocks` blocks, the device for them, and an arena with more slots.

    Without `lock` every copy bounces through the driver's own buffers. `opens` returns the device
    for pages and their tensors; by default it is the one of an engine.
    """

    def __init__(
        self,
        gpu: HostAccelerator,
        shape: PageShape,
        blocks: int,
        *,
        lock: bool = True,
        opens: Callable[[Pages, list[Any]], Device] | None = None,
    ) -> None:
        self.shape, self.gpu, self.blocks = shape, gpu, blocks
        self._random = random.Random(SEED)  # noqa: S311  # an order, not a secret
        self._slots = POOL * blocks
        self._tensors = shape.new_tensors(blocks, gpu.kind)
        self._arena = Arena(self._slots * shape.block_bytes)
        for at in range(0, self._arena.nbytes, shape.block_bytes):
            self._arena.populate(at, shape.block_bytes)
        self.mapped = SharedMapping(self._arena.fd, self._arena.nbytes)
        self.device = (opens or gpu.device)(shape.pages(self._tensors), self._tensors)
        self.locks: Any = gpu.locks(self.device, self.mapped) if lock else None
        self.call_s: list[float] = []

    def moves(self, blocks: int) -> list[Move]:
        """Return copies of some blocks, with slots and pages in random order."""
        size, per_block = self.shape.block_bytes, self.shape.pages_per_block
        ids = self._random.sample(range(self.blocks * per_block), blocks * per_block)
        slots = self._random.sample(range(self._slots), blocks)
        return [
            Move(slot * size, ids[at * per_block : (at + 1) * per_block])
            for at, slot in enumerate(slots)
        ]

    def save(self, moves: Sequence[Move]) -> None:
        """Save a batch, and note how long the call kept its caller."""
        self.call_s.append(save(self.device, self.mapped, moves, self.locks))

    def load(self, moves: Sequence[Move]) -> None:
        """Load a batch."""
        load(self.device, self.mapped, moves, self.locks)

    def verify(self, blocks: int) -> None:
        """Save and load a batch; raise HoldfastError if any byte of the pages has changed."""
        before, moves = [each.random_(0, 256).clone() for each in self._tensors], self.moves(blocks)
        self.save(moves)
        named = [page for move in moves for page in move.pages]
        for each in self._tensors:
            each[named] = 0
        self.load(moves)
        self.gpu.synchronise()
        if not all(map(torch.equal, self._tensors, before)):
            raise HoldfastError(f"{blocks} blocks of {self.shape.model} came back with other bytes")

    def close(self) -> None:
        """Unlock the arena, and close the device."""
        if self.locks is not None:
            self.locks.close()
        self.device.close()
        self._arena.close()


def _wait_ready(staged: StagedBlocks) -> None:
    until_s = time.perf_counter() + SPIN_S
    while not staged.ready():
        if time.perf_counter() > until_s:
            time.sleep(_POLL_S)
