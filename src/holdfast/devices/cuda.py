"""A device for pages in GPU memory, through page-locked buffers of this process.

The arena itself is never page-locked. Its node returns the memory of free slots to the kernel, and
the arena has other pages there later. A GPU keeps the pages that were locked, so its copies would
read and write memory that the arena no longer has, without an error.

`gather` copies pages into a stage in GPU memory on the engine's own stream, so that later work may
overwrite the pages. A thread then copies the stage to the arena, piece by piece. `scatter` copies
in the other direction on the calling thread. While the GPU copies one piece to or from its half of
a bounce buffer, threads copy the next one from or to the arena.

A busy engine gives up the GIL for a few instants only, so a piece takes it a few times, whatever
the number of its pages and layers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from holdfast.buffers import private_memory
from holdfast.devices.base import DeviceMemory, Move, Pages, rows
from holdfast.devices.host import HostDevice, run_anywhere
from holdfast.errors import BlockError
from holdfast.limits import MIB
from holdfast.workers import workers

PIECE_BYTES = 64 * MIB
"""Size of half a bounce buffer, unless one block is larger."""

COPY_THREADS_MAX = 8
"""Most threads that copy one piece. On 16 cores, 2 copied 10 GB/s, 4 copied 16, 8 copied 25."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types in which pages are copied; kernels copy wide words several times faster than bytes."""

_log = logging.getLogger(__name__)


class LoadTransfer(NamedTuple):
    """A batch on the load stream; the event `end`, if any, is recorded after its last copy.

    `copied`: whether the threads copied every byte out of the arena.
    """

    end: Any
    copied: bool

    def done(self) -> bool:
        return self.end is None or bool(self.end.query())

    def wait(self) -> bool:
        if self.end is not None:
            self.end.synchronize()
        return self.copied


class SaveTransfer(NamedTuple):
    """A batch that the saving thread copies into the arena; `result`: whether it could, if any."""

    result: Future[bool] | None

    def done(self) -> bool:
        return self.result is None or self.result.done()

    def wait(self) -> bool:
        return self.result is None or self.result.result()


class Piece(NamedTuple):
    """Blocks of a batch that fill at most one half of a bounce buffer.

    `moves` names slots of the buffer as pages. `slots` and `blocks` are the same blocks in the
    buffer and in the batch.
    """

    moves: list[Move]
    half: int
    slots: slice
    blocks: slice


class BounceBuffer:
    """Page-locked memory in two halves, used in turn, between the arena and GPU memory.

    It has slots for whole payloads: [slot, word]. One thread uses it at a time.
    """

    def __init__(self, pages: Pages, word: Any) -> None:
        self._half_slots = max(1, PIECE_BYTES // pages.payload_bytes)
        slots = 2 * self._half_slots
        nbytes = slots * pages.payload_bytes
        self._raw = private_memory(nbytes)
        memory = torch.frombuffer(self._raw, dtype=torch.uint8, count=nbytes)
        self._address = memory.data_ptr()
        self._slots = memory.view(word).view(slots, -1)
        failed = int(torch.cuda.cudart().cudaHostRegister(self._address, nbytes, 0))
        self._locked = not failed
        if failed:
            _log.warning(
                "a buffer of %d bytes could not be page-locked (CUDA error %d): copies are slower; "
                "raise the limit on locked memory",
                nbytes,
                failed,
            )
        # For the host device, a slot is a page, so that it makes one range of a layer.
        layer_bytes = pages.pages_per_block * pages.page_bytes
        bases = tuple(self._address + layer * layer_bytes for layer in range(len(pages.bases)))
        threads = max(2, min(COPY_THREADS_MAX, len(os.sched_getaffinity(0)) // 2))
        self._host = HostDevice(
            Pages(bases, pages.payload_bytes, layer_bytes, slots, 1), self._raw, threads
        )
        self._copied: list[Any] = [None, None]

    def pieces(self, moves: Sequence[Move]) -> Iterator[Piece]:
        """Split a batch into pieces, for the two halves in turn."""
        size = self._half_slots
        for half, start in zip(itertools.cycle((0, 1)), range(0, len(moves), size), strict=False):
            part, first = moves[start : start + size], half * size
            buffered = [Move(move.payload, (slot,)) for slot, move in enumerate(part, first)]
            yield Piece(
                buffered, half, slice(first, first + len(part)), slice(start, start + len(part))
            )

    def fill(self, arena: DeviceMemory, piece: Piece) -> bool:
        """Copy a piece from the arena into its half, once the GPU has copied what was there."""
        self._wait(piece.half)
        return self._host.scatter(arena, piece.moves).wait()

    def drain(self, arena: DeviceMemory, piece: Piece) -> bool:
        """Copy a piece from its half into the arena, once the GPU has copied it into the half."""
        self._wait(piece.half)
        return self._host.gather(arena, piece.moves).wait()

    def send(self, piece: Piece, stage: Any) -> None:
        """Queue the copy of a piece into the stage of its batch."""
        stage.view(len(stage), -1)[piece.blocks].copy_(self._slots[piece.slots], non_blocking=True)
        self._copied[piece.half] = _recorded()

    def receive(self, piece: Piece, stage: Any) -> None:
        """Queue the copy of a piece out of the stage of its batch."""
        self._slots[piece.slots].copy_(stage.view(len(stage), -1)[piece.blocks], non_blocking=True)
        self._copied[piece.half] = _recorded()

    def close(self) -> None:
        """Release the memory; no copy may be queued."""
        self._host.close()
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._address)

    def _wait(self, half: int) -> None:
        """Wait until the GPU's last copy to or from a half has ended."""
        if self._copied[half] is not None:
            self._copied[half].synchronize()


class CudaDevice:
    """Pages of one GPU: those of an engine's `tensors`, one per layer, laid out as `pages`."""

    def __init__(self, tensors: Sequence[Any], pages: Pages) -> None:
        self.pages = pages
        word = word_of(tensors, pages)
        self._layers = [page_words(tensor, pages, word) for tensor in tensors]
        self._device = self._layers[0].device
        self._load_stream = torch.cuda.Stream(self._device)
        self._save_stream = torch.cuda.Stream(self._device)
        self._load_buffer = BounceBuffer(pages, word)
        self._save_buffer = BounceBuffer(pages, word)
        self._saver = workers(1, "holdfast-save", run_anywhere)
        self._loading = threading.Lock()

    def mark(self) -> Any:
        """Return an event at the end of the work queued on the calling thread's stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def scatter(
        self, arena: DeviceMemory, moves: Sequence[Move], after: Any = None
    ) -> LoadTransfer:
        rows(self.pages, arena, moves)  # raises for what is out of bounds
        if not moves:
            return LoadTransfer(None, copied=True)
        stream, buffer = self._load_stream, self._load_buffer
        with self._loading, self._all_or_nothing(), torch.cuda.stream(stream):
            stage = empty_stage(self._layers, self.pages, len(moves))
            for piece in buffer.pieces(moves):
                if not buffer.fill(arena, piece):
                    return LoadTransfer(stream.record_event(), copied=False)
                buffer.send(piece, stage)
            if after is not None:
                stream.wait_event(after)
            unpack(self._layers, stage, moves)
            return LoadTransfer(stream.record_event(), copied=True)

    def gather(self, arena: DeviceMemory, moves: Sequence[Move]) -> SaveTransfer:
        rows(self.pages, arena, moves)  # raises for what is out of bounds
        size = self.pages.pages_per_block
        for move in moves:
            if len(move.pages) != size:
                raise BlockError(f"{len(move.pages)} pages of a block to save, which has {size}")
        if not moves:
            return SaveTransfer(None)
        stage = pack(self._layers, moves)
        stage.record_stream(self._save_stream)
        return SaveTransfer(self._saver.submit(self._save, arena, moves, stage, self.mark()))

    def close(self) -> None:
        self._saver.shutdown(wait=True)
        with self._loading:
            self._load_stream.synchronize()
        self._save_stream.synchronize()
        self._load_buffer.close()
        self._save_buffer.close()

    def _save(self, arena: DeviceMemory, moves: Sequence[Move], stage: Any, packed: Any) -> bool:
        """Copy a stage into the arena; return whether every byte was copied."""
        buffer, copied = self._save_buffer, True
        before: Piece | None = None
        try:
            with torch.cuda.stream(self._save_stream):
                self._save_stream.wait_event(packed)
                for piece in buffer.pieces(moves):
                    buffer.receive(piece, stage)
                    copied = copied and (before is None or buffer.drain(arena, before))
                    before = piece
                return copied and (before is None or buffer.drain(arena, before))
        except Exception:  # noqa: BLE001  # e.g. a device error: the engine continues
            _log.exception("blocks not saved")
            return False

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Wait for the load stream if a batch fails, because its pages are used for other work."""
        try:
            yield
        except BaseException:
            self._load_stream.synchronize()
            raise


def word_of(tensors: Sequence[Any], pages: Pages) -> Any:
    """Return the widest type that divides pages, the distance between them, and their offsets."""
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    sizes = (pages.page_bytes, pages.stride_bytes, *starts)
    return next(word for word in _WORDS if not any(size % word.itemsize for size in sizes))


def page_words(tensor: Any, pages: Pages, word: Any) -> Any:
    """Return the pages of one layer as words over the same memory: [page, word]."""
    storage = torch.empty(0, dtype=word, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    shape = (pages.pages, pages.page_bytes // word.itemsize)
    strides = (pages.stride_bytes // word.itemsize, 1)
    return storage.as_strided(shape, strides, start // word.itemsize)


def empty_stage(layers: Sequence[Any], pages: Pages, blocks: int) -> Any:
    """Return GPU memory for some payloads: [block, layer, page of the block, word]."""
    shape = (blocks, len(layers), pages.pages_per_block, layers[0].shape[1])
    return torch.empty(shape, dtype=layers[0].dtype, device=layers[0].device)


def pack(layers: Sequence[Any], moves: Sequence[Move]) -> Any:
    """Queue the copy of whole blocks into a new stage: [block, layer, page of the block, word]."""
    first = layers[0]
    ids = _numbers([page for move in moves for page in move.pages], first.device)
    shape = (len(layers), len(ids), first.shape[1])
    by_layer = torch.empty(shape, dtype=first.dtype, device=first.device)
    for layer, packed in zip(layers, by_layer.unbind(), strict=True):
        torch.index_select(layer, 0, ids, out=packed)
    return by_layer.view(len(layers), len(moves), -1, first.shape[1]).transpose(0, 1).contiguous()


def unpack(layers: Sequence[Any], stage: Any, moves: Sequence[Move]) -> None:
    """Queue the copy of staged blocks into their pages, without those that a move does not name."""
    per_block = stage.shape[2]
    ids = [page for move in moves for page in move.pages]
    by_layer = stage.transpose(0, 1).reshape(len(layers), -1, stage.shape[3])
    if len(ids) < by_layer.shape[1]:
        named = [
            block * per_block + page
            for block, move in enumerate(moves)
            for page in range(move.first, move.first + len(move.pages))
        ]
        by_layer = by_layer.index_select(1, _numbers(named, stage.device))
    pages = _numbers(ids, stage.device)
    for layer, staged in zip(layers, by_layer.unbind(), strict=True):
        layer.index_copy_(0, pages, staged)


def _numbers(values: list[int], device: Any) -> Any:
    """Return integers on the device, without waiting for the work that is queued there."""
    numbers = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _recorded() -> Any:
    """Return an event at the end of the current stream; a wait for it does not keep a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
