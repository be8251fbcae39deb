"""How a block lies in a stage: which kernels fill it from pages, and which ranges of its payload.

A stage holds whole opaque payloads, or the heads of portable blocks that this rank's pages have.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple, TypeAlias

from holdfast.blocks.layout import StateRun
from holdfast.devices.arrange import PortablePages
from holdfast.devices.base import DeviceError, LayerPages, Pages
from holdfast.devices.driver import Driver, PageConversion, PageCopy, PageTable
from holdfast.devices.portable_host import check_portable

KernelWork: TypeAlias = PageCopy | PageConversion


class StageRun(NamedTuple):
    """A range of a block: where it begins in the stage and in the payload, and its bytes."""

    stage: int
    payload: int
    nbytes: int


class LayerGroup(NamedTuple):
    """Layers of one size in a stage, at equal distances, and the launches that copy them.

    `works` has a launch of all layers for each part of a layer, with the part's offset in it.
    """

    offset: int
    layers: int
    layer_bytes: int
    works: Sequence[tuple[int, KernelWork]]


class BlockStage(NamedTuple):
    """A block in a stage. `loads` and `saves` are the ranges that are copied from and to arenas."""

    groups: Sequence[LayerGroup]
    nbytes: int
    raw_bytes: int
    loads: Sequence[StageRun]
    saves: Sequence[StageRun]

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest layer: a stage has room for at least one."""
        return max(group.layer_bytes for group in self.groups)

    def launches(
        self, some: LayerRange | None, rows: int, entries: int, stage: int, *, to_pages: bool
    ) -> Iterator[KernelWork]:
        """Yield the launches for blocks in the stage, or for some layers of one block there."""
        for number, group in enumerate(self.groups):
            if some is not None and some.group != number:
                continue
            at = stage if some is not None else stage + group.offset
            layers = some.layers if some is not None else range(group.layers)
            for offset, work in group.works:
                yield work._replace(
                    rows=rows,
                    entries=entries,
                    stage=at + offset,
                    to_pages=to_pages,
                    first_layer=layers.start,
                    layers=len(layers),
                )


class LayerRange(NamedTuple):
    """Some layers of a group, in a stage by themselves."""

    group: int
    layers: range


class Piece(NamedTuple):
    """What one stage of a load holds: whole blocks, or some layers of one block."""

    first_block: int
    blocks: int
    some: LayerRange | None
    offset: int
    nbytes: int
    """Bytes of each block in the stage, from `offset` in the block's stage."""
    ends_block: bool = True
    """False: parts of its block follow."""

    def runs(self, runs: Sequence[StageRun]) -> Iterator[StageRun]:
        """Yield what the piece has of some runs, from its own beginning."""
        end = self.offset + self.nbytes
        for run in runs:
            first, last = max(run.stage, self.offset), min(run.stage + run.nbytes, end)
            if first < last:
                payload = run.payload + first - run.stage
                yield StageRun(first - self.offset, payload, last - first)


def pieces(block: BlockStage, blocks: int, piece_bytes: int) -> Iterator[Piece]:
    """Divide a load: into whole blocks, or blocks that are too large into layers."""
    if block.nbytes <= piece_bytes:
        per_piece = piece_bytes // block.nbytes
        for first in range(0, blocks, per_piece):
            yield Piece(first, min(per_piece, blocks - first), None, 0, block.nbytes)
        return
    for number in range(blocks):
        for at, group in enumerate(block.groups):
            per_part = piece_bytes // group.layer_bytes
            for first in range(0, group.layers, per_part):
                layers = range(first, min(first + per_part, group.layers))
                offset = group.offset + first * group.layer_bytes
                nbytes = len(layers) * group.layer_bytes
                is_last = offset + nbytes == block.nbytes
                yield Piece(number, 1, LayerRange(at, layers), offset, nbytes, is_last)


def opaque_stage(driver: Driver, pages: Pages) -> BlockStage:
    """Return the stage of blocks that are pages as they are."""
    groups: list[LayerGroup] = []
    offset, per_block, nbytes = 0, pages.pages_per_block, pages.raw_bytes
    for group in pages.groups:
        sizes = (group.page_bytes, group.stride_bytes, offset, nbytes)
        table = _table(driver, group, gcd(16, *sizes, *group.bases), group.bases)
        work = PageCopy(table, 0, 0, 0, nbytes, per_block, to_pages=False)
        layer_bytes = per_block * group.page_bytes
        groups.append(LayerGroup(offset, len(group.bases), layer_bytes, [(0, work)]))
        offset += len(group.bases) * layer_bytes
    whole = [StageRun(0, 0, nbytes)]
    return BlockStage(groups, nbytes, nbytes, whole, whole)


def portable_stage(driver: Driver, pages: Pages, portable: PortablePages) -> BlockStage:
    """Return the stage of portable blocks; raise DeviceError for pages of another order.

    It has the heads of this rank, one after another as in the payload. Raises BlockError if format,
    pages and layout do not fit.
    """
    check_portable(pages, portable)
    form, part = portable.form, portable.part
    if pages.lists > 1:
        raise DeviceError(
            f"pages in {pages.lists} page lists are not converted on a GPU yet, only in one"
        )
    saves = _runs(part.runs(), part.written_runs())
    loads = _runs(part.runs(), part.runs())
    if len(form.states) == 1:  # pages of latents are portable as they are
        stage = opaque_stage(driver, pages)
        return stage._replace(raw_bytes=part.layout.raw_bytes, saves=saves, loads=loads)
    (group,) = pages.groups
    per_block, element = pages.pages_per_block, form.element_bytes
    layer_bytes = per_block * form.page_bytes
    nbytes = len(group.bases) * layer_bytes
    works: list[tuple[int, KernelWork]] = []
    offset = 0
    for state in form.states:
        if len(state.tokens) != 1 or len(state.dims) != 1 or state.dims[0].stride != 1:
            raise DeviceError(f"pages of the format {form.name!r} are not converted on a GPU")
        start, tokens = state.start * element, state.tokens[0]
        strides = (state.heads.stride * element, tokens.stride * element)
        head_bytes = state.head_size * element
        bases = [base + start for base in group.bases]
        sizes = (head_bytes, group.stride_bytes, offset, layer_bytes, nbytes)
        table = _table(driver, group, gcd(16, *sizes, *strides, *bases), bases)
        work = PageConversion(
            table, 0, 0, 0, nbytes, per_block, to_pages=False, matrix_bytes=layer_bytes,
            heads=state.heads.length, tokens=tokens.length, head_bytes=head_bytes,
            head_stride_bytes=strides[0], token_stride_bytes=strides[1],
        )  # fmt: skip
        works.append((offset, work))
        offset += state.heads.length * tokens.length * head_bytes * per_block
    groups = [LayerGroup(0, len(group.bases), layer_bytes, works)]
    return BlockStage(groups, nbytes, part.layout.raw_bytes, loads, saves)


def _table(driver: Driver, group: LayerPages, aligned: int, bases: Sequence[int]) -> PageTable:
    address = driver.allocate(8 * len(bases))
    driver.write(address, array("q", bases).tobytes())
    return PageTable(address, len(bases), group.stride_bytes, group.page_bytes, aligned)


def _runs(stored: Sequence[StateRun], wanted: Sequence[StateRun]) -> list[StageRun]:
    """Return wanted ranges of a payload in a stage that has the stored ones, neighbours merged."""
    found: list[StageRun] = []
    at = 0
    left = list(wanted)
    for run in stored:
        while left and left[0].offset < run.offset + run.nbytes:
            want = left.pop(0)
            new = StageRun(at + want.offset - run.offset, want.offset, want.nbytes)
            last = found[-1] if found else StageRun(-1, -1, 0)
            if (last.stage + last.nbytes, last.payload + last.nbytes) == new[:2]:
                found[-1] = last._replace(nbytes=last.nbytes + new.nbytes)
            else:
                found.append(new)
        at += run.nbytes
    return found
