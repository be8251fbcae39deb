"""A device for pages in host memory that keeps portable blocks: it converts while it copies.

Runs of blocks and pages at equal distances are converted where they are. If they are short, numpy
converts between the arena and a stage in the pages' order, in parts small enough for a processor's
cache, and one system call copies a stage to or from its pages. Both release the GIL, and take it
again a few times for each run or part, however many pages it has. Two threads share a batch: the
caller's and one of the device.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.blocks.layout import LayoutSlice, StateRun
from holdfast.buffers import SharedMapping
from holdfast.devices.arrange import Arrangement, Bytes, PortablePages
from holdfast.devices.base import (
    DirectDevice,
    LockedRanges,
    Move,
    Pages,
    check,
    check_whole_block,
)
from holdfast.devices.host import (
    OWN_SHARE,
    SPLIT_BYTES_MIN,
    HostDevice,
    Row,
    copier,
    run_anywhere,
)
from holdfast.errors import BlockError
from holdfast.limits import KIB, MIB
from holdfast.workers import workers

STAGE_BYTES = 4 * MIB
"""Bytes that a thread converts at once through a stage, at least one layer of a block.

They stay in the processor's cache.
"""

DIRECT_BYTES_MIN = 1 * MIB
"""Bytes of blocks and pages at equal distances below which a batch is converted through a stage.

Each run takes the GIL twice; a busy engine lends it after some time only.
"""

IN_PLACE_BYTES_MIN = 256 * KIB
"""Bytes of blocks at equal distances below which a part's blocks are first copied together."""


class ConversionPart(NamedTuple):
    """Some layers of some blocks, which one thread converts at once."""

    moves: Sequence[Move]
    layers: range

    def of(self, span: range) -> ConversionPart:
        """Return the part of some of the blocks."""
        return ConversionPart(self.moves[span.start : span.stop], self.layers)


class Direction(NamedTuple):
    """How blocks are converted in one direction: where they are, or a part through a stage."""

    direct: Callable[[Bytes, Bytes], None]
    staged: Callable[[SharedMapping, ConversionPart, Bytes], bool]


class ConvertingTransfer:
    """A batch whose caller's part has ended, while the helper's may still be in progress."""

    def __init__(self, own: bool, rest: Future[bool] | None) -> None:  # noqa: FBT001  # a result
        self._own = own
        self._rest = rest

    def done(self) -> bool:
        return self._rest is None or self._rest.done()

    def result(self) -> bool:
        # Wait for the helper also if the caller's part failed: no copy may continue afterwards.
        rest = self._rest is None or self._rest.result()
        return self._own and rest


class PortableHostDevice:
    """Pages at fixed addresses of this process, of one size, and portable blocks in the arena.

    The pages hold `portable.part` of each block: some heads of all layers. Holds a reference to
    `keep`, the owner of the pages. Raises BlockError if format, pages and layout do not fit.
    """

    def __init__(self, pages: Pages, portable: PortablePages, keep: Any = None) -> None:
        form, part = portable
        per_block = pages.pages_per_block
        check_portable(pages, portable)
        self.pages = pages
        self._keep = keep
        self._layers = pages.groups[0]
        self._layer_runs = equal_distances([(base,) for base in self._layers.bases])
        self._block_bytes = part.layout.raw_bytes
        self._layer_bytes = part.layout.layer_bytes(0)
        runs = [run for run in part.runs() if run.layer == 0]
        self._in_block = Arrangement(form, per_block, [run.offset for run in runs])
        self._apart = Arrangement(form, per_block)
        self._runs = runs
        self._writes = bool(part.written_runs())
        self._copy = copier()
        self._helper = workers(1, "holdfast-copy", run_anywhere)

    @property
    def failure(self) -> str:
        """Always empty: memory of the host does not fail."""
        return ""

    def mark(self) -> Any:
        """Return None: host work is synchronous, so earlier calls have ended."""
        return None

    def scatter(
        self,
        arena: SharedMapping,
        moves: Sequence[Move],
        after: Any = None,
        locks: LockedRanges | None = None,
        proceed: Callable[[], bool] | None = None,
    ) -> ConvertingTransfer:
        """Copy blocks from the arena into pages, converted; see `base.Device`."""
        del after, locks, proceed
        check(self.pages, arena, moves, self._block_bytes)
        return self._share(arena, moves, Direction(self._in_block.to_pages, self._load))

    def gather(
        self, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
    ) -> ConvertingTransfer:
        """Copy whole blocks into the arena, converted; see `base.DirectDevice`.

        If another rank writes the heads of these pages, nothing is copied.
        """
        del locks
        check(self.pages, arena, moves, self._block_bytes)
        for move in moves:
            check_whole_block(self.pages, move.pages)
        direction = Direction(
            lambda blocks, pages: self._in_block.to_blocks(pages, blocks), self._save
        )
        transfer = self._share(arena, moves if self._writes else [], direction)
        transfer.result()  # the caller may overwrite these pages after this call
        return transfer

    def close(self) -> None:
        """Wait for transfers and stop the thread."""
        self._helper.shutdown(wait=True)

    def _share(
        self, arena: SharedMapping, moves: Sequence[Move], direction: Direction
    ) -> ConvertingTransfer:
        """Convert a batch on this thread and the helper."""

        def run(some: Sequence[Move]) -> bool:
            direct = self._direct(arena, some)
            if direct is not None:
                for blocks, pages in direct:
                    direction.direct(blocks, pages)
                return True
            parts = list(self._parts(some))
            most = max((len(part.moves) * len(part.layers) for part in parts), default=0)
            stage = np.empty(most * self._apart.layer_bytes, np.uint8)
            return all(direction.staged(arena, part, stage) for part in parts)

        is_small = len(moves) * self.pages.raw_bytes < SPLIT_BYTES_MIN
        own = len(moves) if is_small else math.ceil(len(moves) * OWN_SHARE)
        rest = self._helper.submit(run, moves[own:]) if moves[own:] else None
        try:
            return ConvertingTransfer(run(moves[:own]), rest)
        except BaseException:
            ConvertingTransfer(own=False, rest=rest).result()
            raise

    def _direct(
        self, arena: SharedMapping, moves: Sequence[Move]
    ) -> list[tuple[Bytes, Bytes]] | None:
        """Return blocks and pages where they are, in few runs; None if they are in many."""
        step = page_step(moves, self.pages.pages_per_block)
        if step is None:
            return None
        spans = equal_distances([(move.payload, move.pages[0]) for move in moves])
        runs = len(spans) * len(self._layer_runs)
        if runs * DIRECT_BYTES_MIN > len(moves) * self.pages.raw_bytes:
            return None
        parts = [
            ConversionPart(moves[span.start : span.stop], layers)
            for span in spans
            for layers in self._layer_runs
        ]
        return [(self._in_arena(arena, part), self._in_pages(part, step)) for part in parts]

    def _parts(self, moves: Sequence[Move]) -> Iterator[ConversionPart]:
        """Yield all blocks and layers in parts of about `STAGE_BYTES`."""
        count, layer_bytes = len(self._layers.bases), self._apart.layer_bytes
        layers = min(count, max(1, STAGE_BYTES // layer_bytes))
        blocks = max(1, STAGE_BYTES // (layer_bytes * layers))
        for at in range(0, len(moves), blocks):
            for first in range(0, count, layers):
                chosen = range(first, min(count, first + layers))
                yield ConversionPart(moves[at : at + blocks], chosen)

    def _load(self, arena: SharedMapping, part: ConversionPart, memory: Bytes) -> bool:
        stage = self._stage(part, memory)
        spans = self._spans(part)
        if spans is not None:
            for span in spans:
                own = stage[span.start : span.stop]
                self._in_block.to_pages(self._in_arena(arena, part.of(span)), own)
        else:
            apart = np.empty((*stage.shape[:2], self._apart.layer_bytes), np.uint8)
            rows = self._block_rows(arena, part, apart)
            if not self._copy((copied, block, size) for block, copied, size in rows):
                return False
            self._apart.to_pages(apart, stage)
        return self._copy(self._page_rows(part, stage))

    def _save(self, arena: SharedMapping, part: ConversionPart, memory: Bytes) -> bool:
        stage = self._stage(part, memory)
        page_rows = self._page_rows(part, stage)
        if not self._copy((staged, page, size) for page, staged, size in page_rows):
            return False
        spans = self._spans(part)
        if spans is not None:
            for span in spans:
                own = stage[span.start : span.stop]
                self._in_block.to_blocks(own, self._in_arena(arena, part.of(span)))
            return True
        apart = np.empty((*stage.shape[:2], self._apart.layer_bytes), np.uint8)
        self._apart.to_blocks(stage, apart)
        return self._copy(self._block_rows(arena, part, apart))

    def _spans(self, part: ConversionPart) -> list[range] | None:
        """Return the runs of blocks at equal distances in the arena; None if they are small."""
        spans = equal_distances([(move.payload,) for move in part.moves])
        nbytes = len(part.moves) * len(part.layers) * self._apart.layer_bytes
        return spans if len(spans) * IN_PLACE_BYTES_MIN <= nbytes else None

    def _stage(self, part: ConversionPart, memory: Bytes) -> Bytes:
        """Return memory for the pages of a part: [block, layer, page of the block, byte]."""
        blocks, layers = len(part.moves), len(part.layers)
        shape = (blocks, layers, self.pages.pages_per_block, self._layers.page_bytes)
        return memory[: blocks * layers * shape[2] * shape[3]].reshape(shape)

    def _in_arena(self, arena: SharedMapping, part: ConversionPart) -> Bytes:
        """Return blocks at equal distances as they are in the arena: [block, layer, byte]."""
        moves, layers = part
        first = moves[0].payload + layers.start * self._layer_bytes
        by_block = moves[1].payload - moves[0].payload if len(moves) > 1 else 0
        shape = (len(moves), len(layers), self._layer_bytes)
        memory = np.frombuffer(arena.view, np.uint8)[first:]
        return as_strided(memory, shape, (by_block, self._layer_bytes, 1))

    def _in_pages(self, part: ConversionPart, step: int) -> Bytes:
        """Return pages at equal distances where they are: [block, layer, page, byte]."""
        bases, stride, size = self._layers
        moves, layers = part
        first = bases[layers.start] + moves[0].pages[0] * stride
        shape = (len(moves), len(layers), self.pages.pages_per_block, size)
        by_block = moves[1].pages[0] - moves[0].pages[0] if len(moves) > 1 else 0
        by_layer = bases[layers.start + 1] - bases[layers.start] if len(layers) > 1 else 0
        page = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(first)), np.uint8)
        return as_strided(page, shape, (by_block * stride, by_layer, step * stride, 1))

    def _page_rows(self, part: ConversionPart, stage: Bytes) -> Iterator[Row]:
        """Yield the addresses of the pages of a part, and those in the stage, and their bytes."""
        bases, stride, size = self._layers
        layer_bytes = self.pages.pages_per_block * size
        layer_at = stage.ctypes.data
        for move in part.moves:
            for layer in part.layers:
                staged = layer_at + move.first * size
                for page in move.pages:
                    yield bases[layer] + page * stride, staged, size
                    staged += size
                layer_at += layer_bytes

    def _block_rows(
        self, arena: SharedMapping, part: ConversionPart, blocks: Bytes
    ) -> Iterator[Row]:
        """Yield where states are in the arena, and their copies in `blocks`, and their bytes."""
        apart = blocks.ctypes.data
        for move in part.moves:
            for layer in part.layers:
                start = arena.address + move.payload + layer * self._layer_bytes
                for run in self._runs:
                    yield start + run.offset, apart, run.nbytes
                    apart += run.nbytes


def open_portable(pages: Pages, portable: PortablePages, keep: Any = None) -> DirectDevice:
    """Return the device that copies these pages and portable blocks.

    Pages of latents are portable as they are, so a rank that writes them copies whole pages.
    Raises BlockError if format, pages and layout do not fit.
    """
    check_portable(pages, portable)
    if len(portable.form.states) == 1 and portable.part.written_runs():
        return HostDevice(pages, keep)
    return PortableHostDevice(pages, portable, keep)


def check_portable(pages: Pages, portable: PortablePages) -> None:
    """Raise BlockError unless pages of this format hold this part of a portable layout."""
    form, part = portable
    if len(pages.groups) != 1:
        raise BlockError(f"pages of {len(pages.groups)} sizes; portable blocks need one")
    layers, per_block = pages.groups[0], pages.pages_per_block
    if layers.page_bytes != form.page_bytes:
        raise BlockError(
            f"a page of {form.name} has {form.page_bytes} bytes, the engine's {layers.page_bytes}"
        )
    if form.page_tokens * per_block != part.layout.block_tokens:
        raise BlockError(
            f"{per_block} pages of {form.page_tokens} tokens are no block of "
            f"{part.layout.block_tokens}"
        )
    sizes = [state.elements * per_block * form.element_bytes for state in form.states]
    by_layer = _relative_runs(part)
    if len(by_layer) != len(layers.bases) or any(each != by_layer[0] for each in by_layer):
        raise BlockError(
            f"the layout's {len(by_layer)} layers must be alike, and as many as the engine's "
            f"{len(layers.bases)}"
        )
    if [nbytes for _, nbytes in by_layer[0]] != sizes:
        raise BlockError(
            f"a layer of {form.name} pages has states of {sizes} bytes, of the layout "
            f"{[nbytes for _, nbytes in by_layer[0]]}"
        )


def page_step(moves: Sequence[Move], per_block: int) -> int | None:
    """Return the distance between the pages of each block; None if it differs, or pages lack."""
    steps = {after - before for move in moves for before, after in pairwise(move.pages)}
    is_whole = all(len(move.pages) == per_block for move in moves)
    return (steps or {1}).pop() if is_whole and len(steps) <= 1 else None


def equal_distances(positions: Sequence[tuple[int, ...]]) -> list[range]:
    """Return the runs of positions with one distance between neighbours, as ranges of indices."""
    found: list[range] = []
    start = 0
    distances = [tuple(map(operator.sub, after, before)) for before, after in pairwise(positions)]
    while start < len(positions):
        stop = start + 1
        while stop < len(positions) and distances[stop - 1] == distances[start]:
            stop += 1
        found.append(range(start, stop))
        start = stop
    return found


def _relative_runs(part: LayoutSlice) -> list[list[tuple[int, int]]]:
    """Return, for each layer, the offsets of its runs in the layer, and their bytes."""
    starts = part.layout.layer_offsets()
    found: list[list[tuple[int, int]]] = [[] for _ in part.layout.layers]
    run: StateRun
    for run in part.runs():
        found[run.layer].append((run.offset - starts[run.layer], run.nbytes))
    return found
