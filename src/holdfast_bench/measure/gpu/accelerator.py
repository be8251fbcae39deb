"""The GPU of a measurement, through PyTorch; and memory of the host in its place, for a rehearsal.

A rehearsal runs every phase at toy sizes without a GPU. Its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from holdfast.buffers import SharedMapping
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import Device, Pages, StagingDevice
from holdfast.devices.cuda.device import CudaDevice
from holdfast.devices.cuda.libcuda import TUNING, CudaDriver, Tuning
from holdfast.devices.driver import Driver
from holdfast.devices.registry import DeviceOptions, open_device
from holdfast.errors import ConfigError
from holdfast.testing.simulated_driver import SimulatedDriver
from holdfast_bench.measure.gpu.arena_locks import ArenaLocks

Tensor: TypeAlias = Any
"""A tensor of PyTorch, whose types are not known here."""

Stream: TypeAlias = Any
"""A stream of CUDA; None in a rehearsal."""

SEED = 20_26
"""Of the order of work in a rehearsal."""

STEP_BLOCKS = 64
"""The most blocks of a save."""

NO_GPU = "this machine has no GPU that torch can use; run it where an engine does"


class EagerDriver(SimulatedDriver):
    """A simulated driver that does all work as soon as a program asks whether some has ended."""

    def query(self, event: Any) -> bool:  # noqa: ANN401  # as `Driver` has it
        self.run()
        return super().query(event)


class HostAccelerator:
    """Memory of the host; work is done when it is queued, and streams have no effect."""

    kind = "cpu"
    is_gpu = False

    def name(self) -> str:
        """Return the name of the hardware."""
        return "none (rehearsal)"

    def memory_bytes(self) -> int:
        """Return the bytes of the GPU's memory."""
        return 0

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory of the host, as bytes."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def bytes(self, nbytes: int) -> Tensor:
        """Return memory of the GPU, as bytes."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.kind)

    def synchronise(self) -> None:
        """Wait until all queued work has ended."""

    def wait_for_stream(self) -> None:
        """Wait until the work of the calling thread's stream has ended."""

    def stream(self) -> Stream:
        """Return a new stream."""
        return None

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue the work of the block on a stream."""
        del stream
        return contextlib.nullcontext()

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return a call that repeats `work` with little time of the host: a CUDA graph."""
        return work

    def occupy(self, seconds: float) -> None:
        """Queue work that keeps the GPU busy for about this time."""
        time.sleep(seconds)

    def device(
        self, pages: Pages, tensors: Sequence[Tensor], portable: PortablePages | None = None
    ) -> Device:
        """Return Holdfast's device for the pages of an engine, here over a simulated driver."""
        return CudaDevice(self.driver(), pages, DeviceOptions(STEP_BLOCKS, portable), tensors)

    def driver(self, tuning: Tuning = TUNING) -> Driver:
        """Return a new connection to the GPU's driver, which the caller closes."""
        del tuning
        return EagerDriver(SEED)

    def locks(self, device: Device, arena: SharedMapping) -> ArenaLocks | None:
        """Return locks of a whole arena of this process; None if the device uses none."""
        return ArenaLocks(device.registrar, arena) if isinstance(device, StagingDevice) else None

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the time from before `work` until all that it queued has ended."""
        self.synchronise()
        begun_s = time.perf_counter()
        work()
        self.synchronise()
        return time.perf_counter() - begun_s


class CudaAccelerator(HostAccelerator):
    """One GPU of NVIDIA."""

    kind = "cuda"
    is_gpu = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(NO_GPU)
        self._cycles_per_s = 1e9
        """About the clock of the GPU; a wait of a wrong length does no harm."""

    def name(self) -> str:
        return str(torch.cuda.get_device_name())

    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(0).total_memory)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def wait_for_stream(self) -> None:
        torch.cuda.current_stream().synchronize()

    def stream(self) -> Stream:
        return torch.cuda.Stream()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate at their first call
            work()
        torch.cuda.current_stream().wait_stream(side)
        captured: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        replay: Callable[[], object] = captured.replay
        return replay

    def device(
        self, pages: Pages, tensors: Sequence[Tensor], portable: PortablePages | None = None
    ) -> Device:
        return open_device(self.kind, pages, tensors, DeviceOptions(STEP_BLOCKS, portable))

    def driver(self, tuning: Tuning = TUNING) -> Driver:
        torch.cuda.synchronize()  # makes the GPU's context current on this thread
        return CudaDriver(lambda: int(torch.cuda.current_stream().cuda_stream), tuning=tuning)

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))  # noqa: SLF001  # no public call waits


def accelerator(*, rehearse: bool) -> HostAccelerator:
    """Return the GPU of this machine, or what takes its place; raise ConfigError without a GPU."""
    return HostAccelerator() if rehearse else CudaAccelerator()
