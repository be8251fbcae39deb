"""A device for pages in GPU memory: kernels move pages to stages, copies move stages to the arena.

Each batch takes one kernel that copies pages to or from a stage in GPU memory, and one copy for
each block between the stage and the arena. Memory of the arena that the node lets this process lock
is copied by the GPU at the speed of its bus; other memory is copied through the driver's buffers,
which keeps a thread waiting. Calls that queue work never wait, so the GIL is not given up.

A save needs no thread: the engine's thread queues the kernel on the engine's own stream, and the
copy at a later step, when the kernel has ended. So no copy is queued that cannot start: the node
uses a slot again some time after the session that reserved it has ended.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from holdfast.buffers import Registrar, SharedMapping
from holdfast.devices.base import (
    CopiedBytes,
    DeviceError,
    LockedRanges,
    Move,
    Pages,
    check,
    check_pages,
    check_payload,
    check_whole_block,
)
from holdfast.devices.cuda.arena_use import ArenaCopy, ArenaUse
from holdfast.devices.cuda.block_stage import Piece, opaque_stage, pieces, portable_stage
from holdfast.devices.cuda.stage_ring import StageRing
from holdfast.devices.driver import Copies, Driver, DriverError, Event, Stream
from holdfast.devices.registry import DeviceOptions
from holdfast.errors import BlockError
from holdfast.limits import GIB, MIB, RECLAIM_S
from holdfast.workers import workers

PIECE_BYTES = 32 * MIB
"""Most bytes of one batch of copies to the GPU. Between two, copies of other streams can go first:
a copy engine serves the streams in the order in which their copies became ready."""

PIECES = 4
"""Stages of a load: pieces that are on their way at once."""

PIECES_AHEAD = 16
"""A long load waits for the GPU after this many pieces each, with as many still queued: so it can
stop, and the bus has work while the calling thread takes the GIL again."""

SAVE_STAGE_BYTES_MAX = GIB
"""Most GPU memory for the stages of saves, but at least one block."""

SAVE_S = RECLAIM_S / 4
"""Time within which a thread copies blocks to memory that is not locked."""

ROW_BYTES = 8
"""Bytes of a page's number and its slot, as kernels read them."""

_log = logging.getLogger(__name__)

_devices: weakref.WeakSet[CudaDevice] = weakref.WeakSet()


class QueuedCopies:
    """Copies that end with an event; when that is seen, their memory is no longer in use."""

    def __init__(self, device: CudaDevice, event: Event, use: ArenaUse, *, complete: bool) -> None:
        """`complete` False: not all copies of the batch were queued."""
        self._device = device
        self._event = event
        self._use: ArenaUse | None = use
        self._copied = complete

    def done(self) -> bool:
        if self._use is None:
            return True
        try:
            if self._device.driver.query(self._event):
                self._end()
        except DriverError as error:
            self._fail(error)
        return self._use is None

    def result(self) -> bool:
        if self._use is not None:
            try:
                self._device.driver.synchronise(self._event)
                self._end()
            except DriverError as error:
                self._fail(error)
        return self._copied

    def _fail(self, error: DriverError) -> None:
        _log.error("blocks not copied: %s", error)
        self._copied = False
        self._device.rest()
        self._end()

    def _end(self) -> None:
        if self._use is not None:
            self._use.end()
            self._use = None
            self._device.forget(self)


class JoinedTransfer(NamedTuple):
    """Several transfers as one."""

    parts: Sequence[QueuedCopies | Future[bool]]

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def result(self) -> bool:
        results = [part.result() for part in self.parts]
        return all(results)


class StagedSave:
    """The blocks of one save in the ring of stages, from the slot `start` on."""

    def __init__(self, device: CudaDevice, start: int, count: int) -> None:
        self._device = device
        self._start = start
        self._count = count
        self._packed: Event | None = None
        self._ready = False
        self._transfers: list[QueuedCopies | Future[bool]] = []
        self._released = False

    def pack(self) -> None:
        self._packed = self._device.queue_pack(self._start, self._count)

    def ready(self) -> bool:
        if not self._ready and self._packed is not None:
            self._ready = self._device.driver.query(self._packed)
        return self._ready

    def copy(
        self,
        arena: SharedMapping,
        payloads: Sequence[tuple[int, int]],
        locks: LockedRanges | None = None,
    ) -> JoinedTransfer:
        if not self.ready():
            raise DeviceError("blocks are copied before they have left their pages")
        for index, payload in payloads:
            if not 0 <= index < self._count:
                raise BlockError(f"block {index} of a stage that has {self._count}")
            self._device.check_payload(arena, payload)
        placed = [(self._start + index, payload) for index, payload in payloads]
        parts = self._device.queue_save(arena, placed, locks)
        self._transfers += parts
        return JoinedTransfer(parts)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._device.retire(self)

    def at_rest(self) -> bool:
        """Return whether nothing that was queued uses the memory any more."""
        try:
            packed = self._packed is None or self.ready()
        except DriverError:
            self._device.rest()
            packed = True
        return packed and all(transfer.done() for transfer in self._transfers)

    @property
    def start(self) -> int:
        """The first slot of the ring that this save has."""
        return self._start


class CudaDevice:
    """Pages of one GPU, reached through its driver. `keep` owns their memory.

    One thread calls `stage`, `pack`, `copy` and `mark`, one calls `scatter`.
    """

    locks_by_default = True

    def __init__(self, driver: Driver, pages: Pages, options: DeviceOptions, keep: Any) -> None:
        self.pages = pages
        self.driver = driver
        self.registrar: Registrar = driver
        self._keep = keep
        self._failed = ""
        self._process = os.getpid()
        self._counted = {"load": [0, 0], "save": [0, 0]}
        """Bytes by direction, locked and bounced; one thread counts each direction."""
        self._unfinished: set[QueuedCopies] = set()
        self._retiring: list[StagedSave] = []
        """Saves that ended early: their memory is used again when what was queued has ended."""
        self._saver: ThreadPoolExecutor | None = None
        if options.portable is None:
            self._block = opaque_stage(driver, pages)
        else:
            self._block = portable_stage(driver, pages, options.portable)
        self._raw_bytes = self._block.raw_bytes
        self._piece_bytes = max(PIECE_BYTES, self._block.largest_layer_bytes)
        self._load_stages = [driver.allocate(self._piece_bytes) for _ in range(PIECES)]
        step = 2 * options.step_blocks * self._block.nbytes or SAVE_STAGE_BYTES_MAX
        most = max(1, min(step, SAVE_STAGE_BYTES_MAX) // self._block.nbytes)
        self._save_stage, blocks = _most_memory(driver, most, self._block.nbytes)
        self._ring = StageRing(blocks)
        self._copied = [driver.create_event() for _ in range(PIECES)]
        self._unpacked = [driver.create_event() for _ in range(PIECES)]
        self._last_load: QueuedCopies | None = None
        per_block = pages.pages_per_block
        self._save_rows = driver.allocate_locked(blocks * per_block * ROW_BYTES).cast("i")
        self._save_rows[1::2] = array("i", range(blocks * per_block))
        self._save_rows_at = _address(self._save_rows)
        self._load_rows = driver.allocate_locked(pages.pages * ROW_BYTES).cast("i")
        self._load_rows_at = _address(self._load_rows)
        self._save_stream = driver.create_stream(urgent=False)
        self._bounce_stream = driver.create_stream(urgent=False)
        self._copy_stream = driver.create_stream(urgent=False)
        self._unpack_stream = driver.create_stream(urgent=True)
        self._warm_up()
        _devices.add(self)

    @property
    def failure(self) -> str:
        """Why the GPU copies no more blocks; empty while it does."""
        return self._failed

    def mark(self) -> Event:
        """Return an event at the end of the engine's work so far."""
        self._check_alive()
        try:
            return self._event_on(self.driver.engine_stream())
        except DriverError as error:
            self.give_up(str(error))  # no load may start without its mark
            raise

    def scatter(
        self,
        arena: SharedMapping,
        moves: Sequence[Move],
        after: Any = None,
        locks: LockedRanges | None = None,
        proceed: Callable[[], bool] | None = None,
    ) -> QueuedCopies:
        self._check_alive()
        check(self.pages, arena, moves, self._raw_bytes)
        if (named := sum(len(move.pages) for move in moves)) > self.pages.pages:
            raise BlockError(f"{named} pages to fill, the engine has {self.pages.pages}")
        if self._last_load is not None:
            self._last_load.result()  # its page numbers are in the memory that this load writes
        use = ArenaUse(arena, locks, [move.payload for move in moves], self._raw_bytes)
        try:
            complete = self._queue_load(moves, after, use, proceed)
            load = self._recorded(self._unpack_stream, use, complete=complete)
        except BaseException:
            self.rest()  # the pages are used for other work after an error
            use.end()
            raise
        use.want()
        if complete:
            self._count("load", use)
        self._last_load = load
        return load

    def copied_bytes(self) -> CopiedBytes:
        by_path = [
            sum(self._counted[direction][path] for direction in self._counted) for path in (0, 1)
        ]
        return CopiedBytes(*by_path)

    def stage(self, blocks: Sequence[Sequence[int]]) -> StagedSave | None:
        self._check_alive()
        size = self.pages.pages_per_block
        for pages in blocks:
            check_whole_block(self.pages, pages)
            check_pages(self.pages, Move(0, pages))
        self._retire()
        if (start := self._ring.take(len(blocks))) is None:
            return None
        numbers = array("i", [page for pages in blocks for page in pages])
        at = 2 * start * size
        self._save_rows[at : at + 2 * len(numbers) : 2] = numbers
        return StagedSave(self, start, len(blocks))

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a child has no part in what its parent queued
        for transfer in list(self._unfinished):
            transfer.result()
        if self._saver is not None:
            self._saver.shutdown(wait=True)
        if not self._failed:
            self.rest()
        self.driver.close()

    @property
    def staged_blocks(self) -> int:
        """Blocks whose stages are in use."""
        self._retire()
        return self._ring.used

    # For the transfers

    def queue_pack(self, start: int, count: int) -> Event:
        """Queue the kernel that copies pages to their stage, on the engine's stream."""
        self._check_alive()
        size = self.pages.pages_per_block
        used: list[Stream] = []
        try:
            used.append(stream := self.driver.engine_stream())
            rows, stage = self._save_rows_at + start * size * ROW_BYTES, self._save_stage
            for work in self._block.launches(None, rows, count * size, stage, to_pages=False):
                self.driver.launch(work, stream)
            packed = self._event_on(stream)
        except DriverError:
            self.rest(*used)
            raise
        return packed

    def queue_save(
        self, arena: SharedMapping, placed: Sequence[tuple[int, int]], locks: LockedRanges | None
    ) -> list[QueuedCopies | Future[bool]]:
        """Queue copies of slots of the ring into the arena."""
        self._check_alive()
        use = ArenaUse(arena, locks, [payload for _, payload in placed], self._raw_bytes)
        queued: list[QueuedCopies | Future[bool]] = []
        copies: list[ArenaCopy] = []
        bounced: list[Copies] = []
        for (slot, payload), is_locked in zip(placed, use.locked, strict=True):
            stage = self._save_slot(slot)
            block = [
                ArenaCopy(stage + run.stage, payload + run.payload, run.nbytes)
                for run in self._block.saves
            ]
            if is_locked:
                copies += block
            elif block:
                bounced.append(use.from_gpu(block))
        try:
            if copies:
                batch = use.from_gpu(copies)
                self.driver.copy(batch, self._save_stream, source_complete=False)
                queued.append(self._recorded(self._save_stream, use))
            if bounced:
                self._saver = self._saver or workers(1, "holdfast-save")
                until_s = time.monotonic() + SAVE_S
                queued.append(self._saver.submit(self._bounce_save, bounced, until_s))
        except BaseException:
            self.rest()
            use.end()
            raise
        if not copies:
            use.end()
        use.want()
        self._count("save", use)
        return queued

    def retire(self, save: StagedSave) -> None:
        """Use the memory of a save again as soon as nothing that is queued uses it."""
        self._retiring.append(save)
        self._retire()

    def check_payload(self, arena: SharedMapping, payload: int) -> None:
        """Raise BlockError for a payload outside the arena."""
        check_payload(arena, payload, self._raw_bytes)

    def rest(self, *streams: Stream) -> None:
        """Wait until nothing that the device has queued runs; after an error, give it up.

        A GPU that fails runs nothing of what was queued.
        """
        own = (self._save_stream, self._copy_stream, self._unpack_stream)
        try:
            for stream in (*own, *streams):
                self.driver.synchronise(self._event_on(stream))
        except DriverError as error:
            self.give_up(str(error))

    def forget(self, transfer: QueuedCopies) -> None:
        """Forget a transfer that has ended."""
        self._unfinished.discard(transfer)

    def give_up(self, reason: str) -> None:
        """Refuse all later calls."""
        self._failed = self._failed or reason

    # Parts of the calls

    def _check_alive(self) -> None:
        if self._failed:
            raise DeviceError(f"the device has failed: {self._failed}")

    def _warm_up(self) -> None:
        """Launch every kernel once, without work: a first launch waits for the GPU to be idle."""
        rows, stage = self._save_rows_at, self._save_stage
        for to_pages in (False, True):
            for work in self._block.launches(None, rows, 0, stage, to_pages=to_pages):
                self.driver.launch(work, self._unpack_stream)
        self.driver.pause(self._copy_stream)
        self.rest()
        self._check_alive()

    def _event_on(self, stream: Stream) -> Event:
        event = self.driver.create_event()
        self.driver.record(event, stream)
        return event

    def _recorded(self, stream: Stream, use: ArenaUse, *, complete: bool = True) -> QueuedCopies:
        queued = QueuedCopies(self, self._event_on(stream), use, complete=complete)
        self._unfinished.add(queued)
        return queued

    def _count(self, direction: str, use: ArenaUse) -> None:
        runs = self._block.loads if direction == "load" else self._block.saves
        nbytes = sum(run.nbytes for run in runs)
        locked = sum(use.locked)
        self._counted[direction][0] += locked * nbytes
        self._counted[direction][1] += (len(use.locked) - locked) * nbytes

    def _retire(self) -> None:
        still = []
        for save in self._retiring:
            if save.at_rest():
                self._ring.release(save.start)
            else:
                still.append(save)
        self._retiring = still

    def _save_slot(self, slot: int) -> int:
        return self._save_stage + slot * self._block.nbytes

    def _queue_load(
        self,
        moves: Sequence[Move],
        after: Event,
        use: ArenaUse,
        proceed: Callable[[], bool] | None,
    ) -> bool:
        """Queue the pieces of a load; those that share a stage follow each other by events.

        Returns False if `proceed` did: then later pieces are not queued.
        """
        driver, ends = self.driver, deque[Event]()
        if after is not None:
            driver.wait(self._unpack_stream, after)
        rows = self._load_rows_at
        for number, piece in enumerate(pieces(self._block, len(moves), self._piece_bytes)):
            if number and number % PIECES_AHEAD == 0:
                ends.append(self._event_on(self._unpack_stream))
                if len(ends) > 1:
                    driver.synchronise(ends.popleft())
            if proceed is not None and not proceed():
                return False
            ring = number % PIECES
            stage = self._load_stages[ring]
            driver.wait(self._copy_stream, self._unpacked[ring])
            self._fill_stage(moves, use, piece, stage)
            driver.pause(self._copy_stream)
            driver.record(self._copied[ring], self._copy_stream)
            driver.wait(self._unpack_stream, self._copied[ring])
            named = self._write_rows(moves, piece, rows)
            for work in self._block.launches(piece.some, rows, named, stage, to_pages=True):
                driver.launch(work, self._unpack_stream)
            driver.record(self._unpacked[ring], self._unpack_stream)
            if piece.ends_block:
                rows += named * ROW_BYTES
        return True

    def _write_rows(self, moves: Sequence[Move], piece: Piece, rows: int) -> int:
        """Write pages and slots of a piece to the address `rows`, for its kernels.

        Returns how many pages it has. The parts of one block are written alike, one after another.
        """
        pages, slots = array("i"), array("i")
        for number, move in enumerate(moves[piece.first_block :][: piece.blocks]):
            slot = number * self.pages.pages_per_block + move.first
            pages.extend(move.pages)
            slots.extend(range(slot, slot + len(move.pages)))
        at = 2 * (rows - self._load_rows_at) // ROW_BYTES
        end = at + 2 * len(pages)
        self._load_rows[at:end:2] = pages
        self._load_rows[at + 1 : end : 2] = slots
        return len(pages)

    def _fill_stage(self, moves: Sequence[Move], use: ArenaUse, piece: Piece, stage: int) -> None:
        """Queue the copies of one piece from the arena."""
        copies: list[ArenaCopy] = []
        bounced: list[ArenaCopy] = []
        runs = list(piece.runs(self._block.loads))
        for number in range(piece.blocks):
            block = piece.first_block + number
            to, start = stage + number * piece.nbytes, moves[block].payload
            for run in runs:
                if use.locked[block]:
                    copies.append(ArenaCopy(to + run.stage, start + run.payload, run.nbytes))
                else:
                    bounced.append(ArenaCopy(to + run.stage, start + run.payload, run.nbytes))
        if copies:
            self.driver.copy(use.to_gpu(copies), self._copy_stream, source_complete=True)
        if bounced:
            self.driver.bounce(use.to_gpu(bounced), self._copy_stream)

    def _bounce_save(self, blocks: Sequence[Copies], until_s: float) -> bool:
        """Copy blocks into memory that is not locked; return whether every byte came in time."""
        try:
            for copies in blocks:
                if time.monotonic() > until_s:
                    _log.warning("blocks not saved: the GPU did not copy them in %g s", SAVE_S)
                    return False
                self.driver.bounce(copies, self._bounce_stream)
            return True
        except Exception:  # noqa: BLE001  # e.g. a device error: the engine continues
            _log.exception("blocks not saved")
            return False


def _most_memory(driver: Driver, blocks: int, raw_bytes: int) -> tuple[int, int]:
    """Return GPU memory for some blocks, and their number: fewer than asked for if it is short."""
    while True:
        try:
            return driver.allocate(blocks * raw_bytes), blocks
        except DriverError:
            if blocks == 1:
                raise
            blocks //= 2


def _address(memory: memoryview) -> int:
    """Return the address of memory that can be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _give_up_in_child() -> None:
    for device in _devices:
        device.give_up("a child of the engine's process cannot use its GPU")


os.register_at_fork(after_in_child=_give_up_in_child)
