"""A device for pages in GPU memory: one staging tensor per batch, and copies on a side stream.

`gather` copies pages into a staging tensor on the engine's own stream, so that later work may
overwrite the pages, and from there to the pinned arena on a side stream. `scatter` copies in the
other direction, entirely on the side stream, after the work that the engine had queued at `mark`.

**Not yet run on a GPU.** The index arithmetic is tested on CPU tensors; streams, events and pinning
follow torch's documentation only, and docs/how-to/vllm.md says so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast.devices.base import DeviceMemory, Move, Pages, rows

_log = logging.getLogger(__name__)


class CudaTransfer:
    """A batch on the side stream; `event` is recorded after its last copy."""

    def __init__(self, event: Any, stage: Any) -> None:
        self._event = event
        self._stage = stage

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        self._stage = None
        return True


class CudaDevice:
    """Pages of one GPU: those of an engine's `tensors`, one per layer, laid out as `pages`."""

    def __init__(self, tensors: Sequence[Any], pages: Pages) -> None:
        self.pages = pages
        self._layers = [byte_rows(tensor, pages) for tensor in tensors]
        self._stream = torch.cuda.Stream(self._layers[0].device)
        self._lock = threading.Lock()
        self._pinned: tuple[int, Any] | None = None

    def mark(self) -> Any:
        """Return an event at the end of the work queued on the calling thread's stream."""
        return torch.cuda.current_stream(self._layers[0].device).record_event()

    def scatter(
        self, arena: DeviceMemory, moves: Sequence[Move], after: Any = None
    ) -> CudaTransfer:
        rows(self.pages, arena, moves)
        if not moves:
            return CudaTransfer(None, None)
        memory = self._pin(arena)
        with self._all_or_nothing(), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            stage = empty_stage(self._layers, self.pages, len(moves))
            for at, move in enumerate(moves):
                record = memory[move.payload : move.payload + self.pages.payload_bytes]
                stage[at].view(-1).copy_(record, non_blocking=True)
            unstage(self._layers, stage, moves)
            return CudaTransfer(self._stream.record_event(), stage)

    def gather(self, arena: DeviceMemory, moves: Sequence[Move]) -> CudaTransfer:
        rows(self.pages, arena, moves)
        if not moves:
            return CudaTransfer(None, None)
        memory = self._pin(arena)
        stage = empty_stage(self._layers, self.pages, len(moves))
        fill_stage(self._layers, stage, moves)
        self._stream.wait_event(self.mark())
        stage.record_stream(self._stream)
        with self._all_or_nothing(), torch.cuda.stream(self._stream):
            for at, move in enumerate(moves):
                record = memory[move.payload : move.payload + self.pages.payload_bytes]
                record.copy_(stage[at].view(-1), non_blocking=True)
            return CudaTransfer(self._stream.record_event(), stage)

    def close(self) -> None:
        with self._lock:
            self._unpin()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Wait for the side stream if a batch fails, because its pages and slots are reused."""
        try:
            yield
        except BaseException:
            self._stream.synchronize()
            raise

    def _unpin(self) -> None:
        """Unpin the arena, after all copies have ended."""
        self._stream.synchronize()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned[0])
            self._pinned = None

    def _pin(self, arena: DeviceMemory) -> Any:
        """Return the arena as a tensor, page-locked at its first use.

        A restarted node has another arena. The previous one is unpinned first, because otherwise
        the memory of both would stay locked.
        """
        with self._lock:
            if self._pinned is not None and self._pinned[0] == arena.address:
                return self._pinned[1]
            self._unpin()
            failed = int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 0))
            if failed:
                _log.warning("the arena could not be pinned (CUDA error %d): copies are slower and "
                             "block; raise the limit on locked memory", failed)  # fmt: skip
            memory = torch.frombuffer(arena.view, dtype=torch.uint8)
            self._pinned = arena.address, memory
            return memory


def byte_rows(tensor: Any, pages: Pages) -> Any:
    """Return the pages of one layer as bytes: [pages, page_bytes], over the same memory."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    shape, strides = (pages.pages, pages.page_bytes), (pages.stride_bytes, 1)
    return storage.as_strided(shape, strides, start)


def empty_stage(layers: Sequence[Any], pages: Pages, blocks: int) -> Any:
    """Return a tensor for that many payloads: [block, layer, page of the block, byte]."""
    shape = (blocks, len(layers), pages.pages_per_block, pages.page_bytes)
    return torch.empty(shape, dtype=torch.uint8, device=layers[0].device)


def fill_stage(layers: Sequence[Any], stage: Any, moves: Sequence[Move]) -> None:
    """Copy whole blocks from pages into the stage, one kernel pair per layer."""
    ids = torch.tensor([page for move in moves for page in move.pages], device=stage.device)
    for at, layer in enumerate(layers):
        taken = layer.index_select(0, ids)
        stage[:, at] = taken.view(stage.shape[0], stage.shape[2], stage.shape[3])


def unstage(layers: Sequence[Any], stage: Any, moves: Sequence[Move]) -> None:
    """Copy staged blocks into their pages, except for pages that a move does not name."""
    per_block = stage.shape[2]
    ids = torch.tensor([page for move in moves for page in move.pages], device=stage.device)
    kept = torch.tensor(
        [
            at * per_block + index
            for at, move in enumerate(moves)
            for index in range(move.first, move.first + len(move.pages))
        ],
        device=stage.device,
    )
    for at, layer in enumerate(layers):
        staged = stage[:, at].reshape(-1, stage.shape[3])
        layer.index_copy_(0, ids, staged.index_select(0, kept))
