"""Phase 1: what the bus does: page-locked copies of 1, 8 and 64 blocks, each way and both ways."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from holdfast.limits import KIB, MIB
from holdfast.report import Row
from holdfast_bench.harness.hardware_limits import GB
from holdfast_bench.measure.gpu.accelerator import HostAccelerator
from holdfast_bench.measure.gpu.setting import Setting

BLOCKS = (1, 8, 64)
BLOCK_BYTES = 16 * MIB
TOY_BLOCK_BYTES = 64 * KIB


class BusLimit:
    """One copy of page-locked memory to the GPU or from it: the limit of every other figure."""

    def __init__(self, gpu: HostAccelerator, nbytes: int) -> None:
        self._gpu = gpu
        self._locked, self._other_locked = gpu.pinned(nbytes), gpu.pinned(nbytes)
        self._on_gpu, self._other_on_gpu = gpu.bytes(nbytes), gpu.bytes(nbytes)
        self._back = gpu.stream()

    def gb_per_s(self, nbytes: int, *, to_gpu: bool) -> float:
        """Return the speed of one copy."""
        to, source = self._on_gpu[:nbytes], self._locked[:nbytes]
        if not to_gpu:
            to, source = source, to
        return nbytes / self._gpu.seconds(lambda: to.copy_(source, non_blocking=True)) / GB

    def both_gb_per_s(self, nbytes: int) -> float:
        """Return the speed of two copies at once, one each way, in sum."""

        def both() -> None:
            with self._gpu.on(self._back):
                self._other_locked[:nbytes].copy_(self._other_on_gpu[:nbytes], non_blocking=True)
            self._on_gpu[:nbytes].copy_(self._locked[:nbytes], non_blocking=True)

        return 2 * nbytes / self._gpu.seconds(both) / GB


def rows(setting: Setting) -> Iterator[Row]:
    """Yield the speed of the bus for each number of blocks."""
    size = TOY_BLOCK_BYTES if setting.rehearse else BLOCK_BYTES
    limit, rounds = BusLimit(setting.gpu, BLOCKS[-1] * size), setting.rounds
    more: dict[str, object] = {"block_mib": size / MIB, "gpu": setting.gpu.name()}
    for blocks in BLOCKS:
        for name, to_gpu in (("to", True), ("from", False)):
            speeds = [limit.gb_per_s(blocks * size, to_gpu=to_gpu) for _ in range(rounds)]
            yield Row(f"gpu.bus.{name}.{blocks}", statistics.median(speeds), "GB/s", more)
    speeds = [limit.both_gb_per_s(BLOCKS[-1] * size) for _ in range(rounds)]
    yield Row(f"gpu.bus.both.{BLOCKS[-1]}", statistics.median(speeds), "GB/s", more)
