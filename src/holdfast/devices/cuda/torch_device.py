"""A device for pages in GPU memory, through PyTorch: for GPUs of AMD, and where Triton is missing.

`gather` copies pages into a stage on the engine's own stream, so that later work may overwrite the
pages; a thread copies the stage into the arena. `scatter` copies in the other direction, on the
calling thread, after the work that the engine had queued at `mark`. Memory of the arena that is not
page-locked is copied through small buffers of the GPU's driver, which keep the calling thread
waiting.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from holdfast.buffers import Registrar, SharedMapping
from holdfast.devices.base import (
    CopiedBytes,
    DeviceError,
    LockedRanges,
    Move,
    Pages,
    check,
    check_whole_block,
)
from holdfast.devices.cuda.arena_use import ArenaCopy, ArenaUse
from holdfast.devices.cuda.runtime_registrar import RuntimeRegistrar
from holdfast.devices.driver import PageCopy, PageTable
from holdfast.limits import GIB, MIB, RECLAIM_S
from holdfast.workers import workers

STAGE_BYTES = 256 * MIB
"""Size of a stage of a load, at least one block; a longer load uses several in turn."""

STAGED_BYTES_MAX = GIB
"""Most bytes of saves whose stages wait for their copies; a batch beyond them is not saved."""

SAVE_S = RECLAIM_S / 4
"""Time within which blocks of a save are copied; the node may reuse the slots after `RECLAIM_S`."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Types in which pages are copied; kernels copy wide words several times faster than bytes."""

_log = logging.getLogger(__name__)


class LoadTransfer(NamedTuple):
    """A batch on the load stream; `end` is recorded after its last copy. None: an empty batch.

    `complete` False: not all of its copies were queued. When the end is seen, `use` ends.
    """

    end: Any
    use: ArenaUse | None = None
    complete: bool = True

    def done(self) -> bool:
        if self.end is None:
            return True
        ended = bool(self.end.query())
        if ended and self.use is not None:
            self.use.end()
        return ended

    def result(self) -> bool:
        try:
            if self.end is not None:
                self.end.synchronize()
        finally:  # after an error of the GPU, it copies nothing any more
            if self.use is not None:
                self.use.end()
        return self.complete


class TorchDevice:
    """Pages of one GPU: those of an engine's `tensors`, one per layer, laid out as `pages`.

    One thread calls `gather`, one calls `scatter`. On GPUs of AMD, memory is locked only if the
    node's operator asks for it: AMD's documentation advises against locking large KV caches.
    """

    locks_by_default = torch.version.hip is None

    def __init__(self, tensors: Sequence[Any], pages: Pages) -> None:
        if len(pages.groups) != 1:
            raise DeviceError("pages of several sizes need Triton and a GPU of NVIDIA")
        self.pages = pages
        word = word_of(tensors, pages)
        self._layers = [page_words(tensor, pages, word) for tensor in tensors]
        self._device = self._layers[0].device
        self._kernels = triton_copies(self._layers, pages)
        self._load_stream = torch.cuda.Stream(self._device)
        self._save_stream = torch.cuda.Stream(self._device)
        self._saves: list[tuple[int, Future[bool]]] = []
        """Bytes and results of the saves in flight."""
        self._saver = workers(1, "holdfast-save")
        self._runtime = RuntimeRegistrar(self._device)
        self.registrar: Registrar = self._runtime
        self._failed = ""
        self._counted = {"load": [0, 0], "save": [0, 0]}
        """Bytes by direction, locked and bounced; one thread counts each direction."""

    @property
    def failure(self) -> str:
        """Why the GPU copies no more blocks; empty while it does."""
        return self._failed

    def mark(self) -> Any:
        """Return an event at the end of the work queued on the calling thread's stream."""
        self._check_alive()
        try:
            return torch.cuda.current_stream(self._device).record_event()
        except RuntimeError as error:
            self._failed = self._failed or str(error)  # no load may start without its mark
            raise DeviceError(str(error)) from error

    def scatter(
        self,
        arena: SharedMapping,
        moves: Sequence[Move],
        after: Any = None,
        locks: LockedRanges | None = None,
        proceed: Callable[[], bool] | None = None,
    ) -> LoadTransfer:
        self._check_alive()
        check(self.pages, arena, moves)
        if not moves:
            return LoadTransfer(None)
        memory = torch.frombuffer(arena.view, dtype=torch.uint8)
        blocks = max(1, STAGE_BYTES // self.pages.raw_bytes)
        use = self._use(arena, moves, locks)
        try:
            with torch.cuda.stream(self._load_stream):
                for at in range(0, len(moves), blocks):
                    if proceed is not None and not proceed():
                        return LoadTransfer(_recorded(self._device), use, complete=False)
                    part = moves[at : at + blocks]
                    stage = empty_stage(self._layers, self.pages, len(part))
                    self._fill_stage(stage, memory, part, use, use.locked[at : at + blocks])
                    if after is not None:
                        self._load_stream.wait_event(after)
                    self._kernels.unpack(stage, part)
                load = LoadTransfer(_recorded(self._device), use)
        except BaseException:
            self._rest()  # the pages are used for other work after an error
            use.end()
            raise
        use.want()
        self._count("load", use)
        return load

    def gather(
        self, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
    ) -> Future[bool]:
        self._check_alive()
        check(self.pages, arena, moves)
        nbytes = len(moves) * self.pages.raw_bytes
        for move in moves:
            check_whole_block(self.pages, move.pages)
        if not moves:
            return _ended(copied=True)
        self._saves = [save for save in self._saves if not save[1].done()]
        staged = sum(each for each, _ in self._saves)
        if staged and staged + nbytes > STAGED_BYTES_MAX:
            _log.warning("%d blocks not saved: %d bytes still wait to be copied from the GPU; at "
                         "most %d may wait", len(moves), staged, STAGED_BYTES_MAX)  # fmt: skip
            return _ended(copied=False)
        try:
            stage = empty_stage(self._layers, self.pages, len(moves))
            self._kernels.pack(stage, moves)
            stage.record_stream(self._save_stream)
            packed = _recorded(self._device)
        except RuntimeError:
            self._rest()
            raise
        until_s = time.monotonic() + SAVE_S
        save = _Save(arena, moves, stage, packed, locks, until_s)
        result = self._saver.submit(self._save, save)
        self._saves.append((nbytes, result))
        return result

    def close(self) -> None:
        self._saver.shutdown(wait=True)
        self._rest()
        self._runtime.close()

    def copied_bytes(self) -> CopiedBytes:
        """Return how much has been copied from and to locked memory, and other memory."""
        by_path = [sum(counted[path] for counted in self._counted.values()) for path in (0, 1)]
        return CopiedBytes(*by_path)

    def _check_alive(self) -> None:
        if self._failed:
            raise DeviceError(f"the device has failed: {self._failed}")

    def _rest(self) -> None:
        """Wait until no load runs; if the GPU has failed, give it up: it runs nothing any more."""
        try:
            self._load_stream.synchronize()
        except RuntimeError as error:
            self._failed = self._failed or str(error)

    def _save(self, save: _Save) -> bool:
        """Copy a stage into the arena; return whether every byte was copied in time."""
        try:
            save.packed.synchronize()
            memory = torch.frombuffer(save.arena.view, dtype=torch.uint8)
            use = self._use(save.arena, save.moves, save.locks)
            try:
                with torch.cuda.stream(self._save_stream):
                    if not self._copy_out(save, memory, use):
                        return False
            finally:
                self._save_stream.synchronize()
                use.end()
        except Exception:  # noqa: BLE001  # e.g. a device error: the engine continues
            _log.exception("blocks not saved")
            self._rest()
            return False
        use.want()
        self._count("save", use)
        return True

    def _fill_stage(
        self, stage: Any, memory: Any, moves: Sequence[Move], use: ArenaUse, locked: Sequence[bool]
    ) -> None:
        """Queue the copies of blocks into a stage; wait for those of memory that is not locked.

        A part of such a block may be in a chunk that is locked, and no use keeps it so.
        """
        for move, staged, is_locked in zip(moves, payloads(stage), locked, strict=True):
            for source, to in self._parts(memory, move, staged, use):
                to.copy_(source, non_blocking=is_locked or not use.has_locks)

    def _copy_out(self, save: _Save, memory: Any, use: ArenaUse) -> bool:
        """Copy a stage into the arena; return False if it is too late for a block."""
        for move, staged in zip(save.moves, payloads(save.stage), strict=True):
            if time.monotonic() > save.until_s:
                _log.warning("blocks not saved: the GPU did not copy them in %g s", SAVE_S)
                return False
            for to, source in self._parts(memory, move, staged, use):
                to.copy_(source)
        return True

    def _use(
        self, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None
    ) -> ArenaUse:
        return ArenaUse(arena, locks, [move.payload for move in moves], self.pages.raw_bytes)

    def _parts(
        self, memory: Any, move: Move, staged: Any, use: ArenaUse
    ) -> Iterator[tuple[Any, Any]]:
        """Yield parts of a payload in the arena and in its stage; each is in one lock's memory."""
        for part in use.cut(ArenaCopy(0, move.payload, self.pages.raw_bytes)):
            yield (
                memory[part.offset : part.offset + part.nbytes],
                staged[part.gpu : part.gpu + part.nbytes],
            )

    def _count(self, direction: str, use: ArenaUse) -> None:
        locked = sum(use.locked)
        self._counted[direction][0] += locked * self.pages.raw_bytes
        self._counted[direction][1] += (len(use.locked) - locked) * self.pages.raw_bytes


class _Save(NamedTuple):
    """Staged blocks on their way to the arena, when the event `packed` has ended."""

    arena: SharedMapping
    moves: Sequence[Move]
    stage: Any
    packed: Any
    locks: LockedRanges | None
    until_s: float


def word_of(tensors: Sequence[Any], pages: Pages) -> Any:
    """Return the widest type that divides pages, the distance between them, and their offsets."""
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    (group,) = pages.groups
    sizes = (group.page_bytes, group.stride_bytes, *starts)
    return next(word for word in _WORDS if not any(size % word.itemsize for size in sizes))


def page_words(tensor: Any, pages: Pages, word: Any) -> Any:
    """Return the pages of one layer as words over the same memory: [page, word]."""
    storage = torch.empty(0, dtype=word, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    (group,) = pages.groups
    shape = (pages.pages, group.page_bytes // word.itemsize)
    strides = (group.stride_bytes // word.itemsize, 1)
    return storage.as_strided(shape, strides, start // word.itemsize)


def empty_stage(layers: Sequence[Any], pages: Pages, blocks: int) -> Any:
    """Return GPU memory for some payloads: [block, layer, page of the block, word]."""
    shape = (blocks, len(layers), pages.pages_per_block, layers[0].shape[1])
    return torch.empty(shape, dtype=layers[0].dtype, device=layers[0].device)


def payloads(stage: Any) -> Sequence[Any]:
    """Return the bytes of each payload of a stage."""
    by_block: Sequence[Any] = stage.view(len(stage), -1).view(torch.uint8).unbind()
    return by_block


class TorchCopies:
    """Copies between pages and stages by PyTorch's operations, some for each layer."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers

    def pack(self, stage: Any, moves: Sequence[Move]) -> None:
        """Queue the copy of whole blocks from their pages into a stage."""
        ids = _numbers([page for move in moves for page in move.pages], stage.device)
        for staged, layer in zip(stage.unbind(1), self._layers, strict=True):
            staged.copy_(layer.index_select(0, ids).view(staged.shape))

    def unpack(self, stage: Any, moves: Sequence[Move]) -> None:
        """Queue the copy of staged blocks into their pages, without those that no move names."""
        ids = _numbers([page for move in moves for page in move.pages], stage.device)
        slots = [slot for _, slot in named_pages(moves, stage.shape[2])]
        named = _numbers(slots, stage.device)
        for staged, layer in zip(stage.unbind(1), self._layers, strict=True):
            layer.index_copy_(0, ids, staged.reshape(-1, stage.shape[3]).index_select(0, named))


class TritonCopies:
    """Copies between pages and stages by one kernel for all layers."""

    def __init__(self, layers: Sequence[Any], pages: Pages) -> None:
        from holdfast.devices.cuda.compiled import CopyVariant

        (group,) = pages.groups
        aligned = math.gcd(16, group.page_bytes, group.stride_bytes, *group.bases)
        device = layers[0].device
        bases = torch.tensor(group.bases, dtype=torch.int64, device=device)
        table = PageTable(0, len(layers), group.stride_bytes, group.page_bytes, aligned)
        self._work = PageCopy(table, 0, 0, 0, pages.raw_bytes, pages.pages_per_block, False)
        self._bases = bases
        self._keep = layers
        self._kernels = [
            CopyVariant(group.page_bytes, aligned, to_pages=to_pages).kernel()[:2]
            for to_pages in (False, True)
        ]

    def pack(self, stage: Any, moves: Sequence[Move]) -> None:
        """Queue the copy of whole blocks from their pages into a stage."""
        self._launch(stage, moves, *self._kernels[0])

    def unpack(self, stage: Any, moves: Sequence[Move]) -> None:
        """Queue the copy of staged blocks into their pages, without those that no move names."""
        self._launch(stage, moves, *self._kernels[1])

    def _launch(self, stage: Any, moves: Sequence[Move], kernel: Any, constants: Any) -> None:
        from holdfast.devices.cuda.compiled import copy_arguments

        named = named_pages(moves, self._work.pages_per_block)
        rows = _numbers([number for pair in named for number in pair], stage.device, torch.int32)
        numbers = copy_arguments(self._work._replace(entries=len(named)))
        programs = min(numbers[0], PROGRAMS_MAX)
        kernel[(programs,)](self._bases, rows, stage.view(-1), *numbers, **constants)


PROGRAMS_MAX = 1056
"""Most programs of a launch; each does several jobs if there are more."""


def triton_copies(layers: Sequence[Any], pages: Pages) -> TorchCopies | TritonCopies:
    """Return copies by kernels; by operations for layers on CPUs, and without Triton."""
    if layers[0].device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return TorchCopies(layers)
    return TritonCopies(layers, pages)


def named_pages(moves: Sequence[Move], per_block: int) -> list[tuple[int, int]]:
    """Return the pages of a batch, each with its slot in the stage: block * per_block + page."""
    return [
        (page, block * per_block + move.first + at)
        for block, move in enumerate(moves)
        for at, page in enumerate(move.pages)
    ]


def _numbers(values: list[int], device: Any, kind: Any = torch.int64) -> Any:
    """Return integers on the device, without waiting for the work that is queued there."""
    numbers = torch.tensor(values, dtype=kind)
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _recorded(device: Any) -> Any:
    """Return an event at the end of the current stream; a wait for it does not keep a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _ended(*, copied: bool) -> Future[bool]:
    """Return the result of a save without work."""
    result: Future[bool] = Future()
    result.set_result(copied)
    return result
