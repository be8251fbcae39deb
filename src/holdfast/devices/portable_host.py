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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    LayerPages,
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

    The pages hold `portable.part` of each block: some heads of some layers. Holds a reference to
    `keep`, the owner of the pages. Raises BlockError if format, pages and layout do not fit.
    """

    def __init__(self, pages: Pages, portable: PortablePages, keep: Any = None) -> None:
        check_portable(pages, portable)
        self.pages = pages
        self._keep = keep
        self._block_bytes = portable.part.layout.raw_bytes
        per_list, copy = pages.pages_per_block // pages.lists, copier()
        self._lists = [
            ListConversion(portable, layers, range(at * per_list, (at + 1) * per_list), copy)
            for at, layers in enumerate(zip(pages.groups, portable.layers_by_list, strict=True))
        ]
        self._writes = bool(portable.part.written_runs())
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
        return self._share(arena, moves, to_pages=True)

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
        transfer = self._share(arena, moves if self._writes else [], to_pages=False)
        transfer.result()  # the caller may overwrite these pages after this call
        return transfer

    def close(self) -> None:
        """Wait for transfers and stop the thread."""
        self._helper.shutdown(wait=True)

    def _share(
        self, arena: SharedMapping, moves: Sequence[Move], *, to_pages: bool
    ) -> ConvertingTransfer:
        """Convert a batch on this thread and the helper."""

        def run(some: Sequence[Move]) -> bool:
            return all(each.convert(arena, some, to_pages=to_pages) for each in self._lists)

        is_small = len(moves) * self.pages.raw_bytes < SPLIT_BYTES_MIN
        own = len(moves) if is_small else math.ceil(len(moves) * OWN_SHARE)
        rest = self._helper.submit(run, moves[own:]) if moves[own:] else None
        try:
            return ConvertingTransfer(run(moves[:own]), rest)
        except BaseException:
            ConvertingTransfer(own=False, rest=rest).result()
            raise


class ListConversion:
    """Converts, in the calling thread, the pages that one list of a block's pages names.

    `layers`: the addresses of the list's layers, and their numbers in the layout. `listed`: which
    of a block's pages are on the list.
    """

    def __init__(
        self,
        portable: PortablePages,
        layers: tuple[LayerPages, Sequence[int]],
        listed: range,
        copy: Callable[[Iterable[Row]], bool],
    ) -> None:
        form, part = portable.form, portable.part
        self._layers, numbers = layers
        self._listed = listed
        self._copy = copy
        starts = part.layout.layer_offsets()
        self._starts = [starts[number] for number in numbers]
        self._layer_bytes = part.layout.layer_bytes(numbers[0]) if numbers else 0
        self._runs = _relative_runs(part)[numbers[0]] if numbers else []
        self._in_block = Arrangement(form, len(listed), [offset for offset, _ in self._runs])
        self._apart = Arrangement(form, len(listed))
        self._spans_in_arena = equal_distances([(start,) for start in self._starts])
        self._spans_in_both = equal_distances(
            list(zip(self._layers.bases, self._starts, strict=True))
        )

    def convert(self, arena: SharedMapping, moves: Sequence[Move], *, to_pages: bool) -> bool:
        """Convert what moves name of the list's pages; return whether all was copied."""
        if not self._starts:
            return True
        moves = self._of_list(moves)
        direct = self._direct(arena, moves)
        if direct is not None:
            for blocks, pages in direct:
                if to_pages:
                    self._in_block.to_pages(blocks, pages)
                else:
                    self._in_block.to_blocks(pages, blocks)
            return True
        parts = list(self._parts(moves))
        most = max((len(part.moves) * len(part.layers) for part in parts), default=0)
        stage = np.empty(most * self._apart.layer_bytes, np.uint8)
        staged = self._load if to_pages else self._save
        return all(staged(arena, part, stage) for part in parts)

    def _of_list(self, moves: Sequence[Move]) -> Sequence[Move]:
        """Return what moves name of the list's pages, with `first` counted on the list."""
        listed, found = self._listed, list[Move]()
        for move in moves:
            first = max(move.first, listed.start)
            pages = move.pages[first - move.first : max(listed.stop - move.first, 0)]
            if pages:
                found.append(Move(move.payload, pages, first - listed.start))
        return found

    def _direct(
        self, arena: SharedMapping, moves: Sequence[Move]
    ) -> list[tuple[Bytes, Bytes]] | None:
        """Return blocks and pages where they are, in few runs; None if they are in many."""
        step = page_step(moves, len(self._listed))
        if step is None:
            return None
        spans = equal_distances([(move.payload, move.pages[0]) for move in moves])
        runs = len(spans) * len(self._spans_in_both)
        nbytes = len(moves) * len(self._starts) * self._apart.layer_bytes
        if runs * DIRECT_BYTES_MIN > nbytes:
            return None
        parts = [
            ConversionPart(moves[span.start : span.stop], layers)
            for span in spans
            for layers in self._spans_in_both
        ]
        return [(self._in_arena(arena, part), self._in_pages(part, step)) for part in parts]

    def _parts(self, moves: Sequence[Move]) -> Iterator[ConversionPart]:
        """Yield all blocks and layers in parts of about `STAGE_BYTES`."""
        layer_bytes = self._apart.layer_bytes
        layers = min(len(self._starts), max(1, STAGE_BYTES // layer_bytes))
        blocks = max(1, STAGE_BYTES // (layer_bytes * layers))
        for at in range(0, len(moves), blocks):
            for span in self._spans_in_arena:
                for first in range(span.start, span.stop, layers):
                    chosen = range(first, min(span.stop, first + layers))
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
        shape = (blocks, layers, len(self._listed), self._layers.page_bytes)
        return memory[: blocks * layers * shape[2] * shape[3]].reshape(shape)

    def _in_arena(self, arena: SharedMapping, part: ConversionPart) -> Bytes:
        """Return blocks at equal distances as they are in the arena: [block, layer, byte]."""
        moves, layers = part
        first = moves[0].payload + self._starts[layers.start]
        by_block = moves[1].payload - moves[0].payload if len(moves) > 1 else 0
        shape = (len(moves), len(layers), self._layer_bytes)
        by_layer = _distance(self._starts, layers)
        memory = np.frombuffer(arena.view, np.uint8)[first:]
        return as_strided(memory, shape, (by_block, by_layer, 1))

    def _in_pages(self, part: ConversionPart, step: int) -> Bytes:
        """Return pages at equal distances where they are: [block, layer, page, byte]."""
        bases, stride, size = self._layers
        moves, layers = part
        first = bases[layers.start] + moves[0].pages[0] * stride
        shape = (len(moves), len(layers), len(self._listed), size)
        by_block = moves[1].pages[0] - moves[0].pages[0] if len(moves) > 1 else 0
        by_layer = _distance(bases, layers)
        page = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(first)), np.uint8)
        return as_strided(page, shape, (by_block * stride, by_layer, step * stride, 1))

    def _page_rows(self, part: ConversionPart, stage: Bytes) -> Iterator[Row]:
        """Yield the addresses of the pages of a part, and those in the stage, and their bytes."""
        bases, stride, size = self._layers
        layer_bytes = len(self._listed) * size
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
                start = arena.address + move.payload + self._starts[layer]
                for offset, nbytes in self._runs:
                    yield start + offset, apart, nbytes
                    apart += nbytes


def open_portable(pages: Pages, portable: PortablePages, keep: Any = None) -> DirectDevice:
    """Return the device that copies these pages and portable blocks.

    Pages of latents are portable as they are, so a rank that writes whole blocks of them copies
    whole pages. Raises BlockError if format, pages and layout do not fit.
    """
    check_portable(pages, portable)
    part = portable.part
    is_plain = len(portable.form.states) == 1 and pages.lists == 1
    if is_plain and part.written_runs() == part.layout.whole().runs():
        return HostDevice(pages, keep)
    return PortableHostDevice(pages, portable, keep)


def check_portable(pages: Pages, portable: PortablePages) -> None:
    """Raise BlockError unless pages of this format hold this part of a portable layout."""
    form, part, lists = portable.form, portable.part, portable.layers_by_list
    if len(pages.groups) != len(lists) or pages.lists != len(lists):
        raise BlockError(
            f"pages of {len(pages.groups)} groups in {pages.lists} lists; portable blocks need a "
            f"group for each of the {len(lists)} lists"
        )
    per_list, rest = divmod(pages.pages_per_block, pages.lists)
    if rest or form.page_tokens * per_list != part.layout.block_tokens:
        raise BlockError(
            f"{per_list} pages of {form.page_tokens} tokens are no block of "
            f"{part.layout.block_tokens}"
        )
    sizes = [state.elements * per_list * form.element_bytes for state in form.states]
    by_layer = _relative_runs(part)
    held = [layer for layer, runs in enumerate(by_layer) if runs]
    if sorted(layer for layers in lists for layer in layers) != held:
        raise BlockError(f"page lists of the layers {lists}; the slice has {held}")
    for layers, numbers in zip(pages.groups, lists, strict=True):
        if layers.page_bytes != form.page_bytes:
            raise BlockError(
                f"a page of {form.name} has {form.page_bytes} bytes, the engine's "
                f"{layers.page_bytes}"
            )
        if len(layers.bases) != len(numbers):
            raise BlockError(
                f"a page list has {len(numbers)} layers of the layout, and {len(layers.bases)} of "
                "the engine"
            )
        for number in numbers:
            if by_layer[number] != by_layer[held[0]]:
                raise BlockError(f"layers {held[0]} and {number} of the layout must be alike")
    if [nbytes for _, nbytes in by_layer[held[0]]] != sizes:
        raise BlockError(
            f"a layer of {form.name} pages has states of {sizes} bytes, of the layout "
            f"{[nbytes for _, nbytes in by_layer[held[0]]]}"
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


def _distance(positions: Sequence[int], chosen: range) -> int:
    """Return the distance between neighbours of a run of positions at equal distances."""
    return positions[chosen.start + 1] - positions[chosen.start] if len(chosen) > 1 else 0


def _relative_runs(part: LayoutSlice) -> list[list[tuple[int, int]]]:
    """Return, for each layer, the offsets of its runs in the layer, and their bytes."""
    starts = part.layout.layer_offsets()
    found: list[list[tuple[int, int]]] = [[] for _ in part.layout.layers]
    run: StateRun
    for run in part.runs():
        found[run.layer].append((run.offset - starts[run.layer], run.nbytes))
    return found
