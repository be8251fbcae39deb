"""Long copies to the GPU in pieces: a copy engine serves copies first come, first served."""

from __future__ import annotations

from holdfast.buffers import SharedMapping
from holdfast.devices.driver import Copies
from holdfast.tiers.arena import Arena
from holdfast_bench.measure.gpu.accelerator import HostAccelerator
from holdfast_bench.measure.gpu.arena_locks import ArenaLocks


class PiecedCopy:
    """A copy of a locked arena to the GPU, `block_bytes` at a time, in pieces of some blocks."""

    def __init__(self, gpu: HostAccelerator, nbytes: int, block_bytes: int) -> None:
        self.nbytes, self._block_bytes = nbytes, block_bytes
        self._driver = gpu.driver()
        self._arena = Arena(nbytes)
        self._arena.populate(0, nbytes)
        self._mapped = SharedMapping(self._arena.fd, nbytes)
        self._locks = ArenaLocks(self._driver, self._mapped)
        self._on_gpu = gpu.bytes(nbytes)
        self._stream = self._driver.create_stream(urgent=False)
        self._end = self._driver.create_event()

    def copy(self, piece_bytes: int, *, pause: bool) -> None:
        """Copy everything, with a kernel that does next to nothing between pieces if `pause`."""
        driver, size, to = self._driver, self._block_bytes, int(self._on_gpu.data_ptr())
        for first in range(0, self.nbytes, piece_bytes):
            starts = range(first, min(first + piece_bytes, self.nbytes), size)
            copies = Copies(
                [to + at for at in starts],
                [self._mapped.address + at for at in starts],
                [size] * len(starts),
            )
            driver.copy(copies, self._stream, source_complete=True)
            if pause:
                driver.pause(self._stream)
        driver.record(self._end, self._stream)
        driver.synchronise(self._end)

    def close(self) -> None:
        """Unlock and release the memory."""
        self._locks.close()
        self._driver.close()
        self._arena.close()
