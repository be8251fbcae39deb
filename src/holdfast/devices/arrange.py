"""Rearrange an engine's pages as portable blocks, and back: a batch in a few calls of numpy.

A portable layer is `[k|v][head][token][dim]`; a page has the order of its `PageFormat`. Each state
of a batch is one strided copy, which releases the GIL, so the number of blocks adds no Python code.
Elements are copied in the widest words that are contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from holdfast.blocks.layout import LayoutSlice
from holdfast.devices.page_format import PageAxis, PageFormat, PageState
from holdfast.errors import BlockError

Bytes: TypeAlias = npt.NDArray[np.uint8]
_Words: TypeAlias = npt.NDArray[np.generic]

_WORD_BYTES_MAX = 8
_ROW_BYTES_MIN = 64
"""Shortest row that numpy copies faster as one opaque element; shorter ones as words."""

_SHORT_AXIS = 2
_BATCH_AXES = 2


class _StateCopy(NamedTuple):
    """One state on both sides: byte offsets in a page and in a layer, and the axes inside them.

    `lengths`, `page_strides` and `block_strides` start with heads and pages of a block. The stride
    of a page depends on the batch.
    """

    word: np.dtype[np.generic]
    in_page: int
    in_layer: int
    lengths: tuple[int, ...]
    page_strides: tuple[int, ...]
    block_strides: tuple[int, ...]


class PortablePages(NamedTuple):
    """Pages that hold a part of each portable block: their format, and which heads they hold.

    `lists`: for each page list of a block, the layers of the layout whose pages it names, in the
    order of the engine's layers. Empty: one list names the pages of all layers of the part.
    """

    form: PageFormat
    part: LayoutSlice
    lists: tuple[tuple[int, ...], ...] = ()

    @property
    def layers_by_list(self) -> tuple[tuple[int, ...], ...]:
        """For each page list, its layers in the layout."""
        held = tuple(layer for layer, heads in enumerate(self.part.heads) if heads)
        return self.lists or (held,)


class Arrangement:
    """Converts between pages of one format and portable layers of `pages_per_block` pages.

    `starts`: for each state, the byte offset in a layer of its first head; default: a layer has
    the heads of the format only. Arrays of a batch are bytes, of pages `[block][layer][page of the
    block][byte]`, of blocks `[block][layer][byte]`; the last axis is contiguous, and the others
    may have any strides.
    """

    def __init__(
        self, form: PageFormat, pages_per_block: int, starts: Sequence[int] | None = None
    ) -> None:
        """Raise BlockError for a number of starts or pages that does not fit."""
        if pages_per_block < 1:
            raise BlockError(f"{pages_per_block} pages in a block; pass at least 1")
        self.form = form
        self.pages_per_block = pages_per_block
        sizes = [state.elements * pages_per_block * form.element_bytes for state in form.states]
        self.starts = tuple(starts or (sum(sizes[:at]) for at in range(len(sizes))))
        if len(self.starts) != len(sizes) or min(self.starts) < 0:
            raise BlockError(f"starts {self.starts} given for the {len(sizes)} states of a page")
        self.layer_bytes = max(start + size for start, size in zip(self.starts, sizes, strict=True))
        """Bytes of a layer up to the end of the last of these heads."""
        self._copies = [
            _state_copy(form.element_bytes, state, start, pages_per_block)
            for state, start in zip(form.states, self.starts, strict=True)
        ]

    def to_blocks(self, pages: Bytes, blocks: Bytes) -> None:
        """Write the portable form of `pages` into `blocks`; raise BlockError for a wrong shape."""
        for page_words, block_words in self._views(pages, blocks):
            _copy(block_words, page_words)

    def to_pages(self, blocks: Bytes, pages: Bytes) -> None:
        """Write portable `blocks` into `pages`; raise BlockError for a wrong shape."""
        for page_words, block_words in self._views(pages, blocks):
            _copy(page_words, block_words)

    def _views(self, pages: Bytes, blocks: Bytes) -> Iterator[tuple[_Words, _Words]]:
        """Yield each state in the pages and in the blocks: arrays of one shape, portable order."""
        self._check(pages, blocks)
        batch, by_page = pages.shape[:2], pages.strides[2]
        for each in self._copies:
            heads, _, *inner = each.page_strides
            shape = (*batch, *each.lengths)
            page_strides = (*pages.strides[:2], heads, by_page, *inner)
            block_strides = (*blocks.strides[:2], *each.block_strides)
            yield (
                _strided(pages, each.in_page, each.word, shape, page_strides),
                _strided(blocks, each.in_layer, each.word, shape, block_strides),
            )

    def _check(self, pages: Bytes, blocks: Bytes) -> None:
        """Raise BlockError unless every view lies within the memory given."""
        page = (self.pages_per_block, self.form.page_bytes)
        for what, array in (("pages", pages), ("blocks", blocks)):
            if array.dtype != np.uint8 or array.strides[-1] != 1:
                raise BlockError(f"{what} are {array.dtype} of strides {array.strides}; pass bytes")
        if pages.ndim != 4 or blocks.ndim != 3 or pages.shape[:2] != blocks.shape[:2]:  # noqa: PLR2004
            raise BlockError(
                f"pages of shape {pages.shape} and blocks of shape {blocks.shape}; pass pages as "
                "[block][layer][page][byte] and blocks as [block][layer][byte]"
            )
        if pages.shape[2:] != page:
            raise BlockError(
                f"{pages.shape[2]} pages of {pages.shape[3]} bytes in a block; with "
                f"{self.form.name} a block has {page[0]} of {page[1]} bytes"
            )
        if blocks.shape[2] < self.layer_bytes:
            raise BlockError(
                f"layers of {blocks.shape[2]} bytes; the states end at byte {self.layer_bytes}"
            )


def _state_copy(
    element_bytes: int, state: PageState, start: int, pages_per_block: int
) -> _StateCopy:
    """Return how a state is copied; its first head is at `start` in a portable layer."""
    inner = (*state.tokens, *state.dims)
    page_elements = state.head_tokens * state.head_size
    portable: list[PageAxis] = []
    stride = page_elements
    for axis in inner:
        stride //= axis.length
        portable.append(PageAxis(axis.length, stride))
    row, outside = _contiguous_row(inner, portable)
    row_bytes = row * element_bytes
    word = _word(row_bytes, element_bytes)
    repeat = (
        [PageAxis(row_bytes // word.itemsize, word.itemsize)] if row_bytes > word.itemsize else []
    )

    def strides(heads: int, page: int, axes: Sequence[PageAxis]) -> tuple[int, ...]:
        elements = (heads, page, *(axis.stride for axis in axes[:outside]))
        return (*(each * element_bytes for each in elements), *(axis.stride for axis in repeat))

    lengths = (axis.length for axis in (*inner[:outside], *repeat))
    return _StateCopy(
        word,
        state.start * element_bytes,
        start,
        (state.heads.length, pages_per_block, *lengths),
        strides(state.heads.stride, 0, inner),
        strides(page_elements * pages_per_block, page_elements, portable),
    )


def _contiguous_row(one: Sequence[PageAxis], other: Sequence[PageAxis]) -> tuple[int, int]:
    """Return the innermost row that is contiguous on both sides: its elements, the axes outside."""
    row, outside = 1, len(one)
    while outside and one[outside - 1].stride == other[outside - 1].stride == row:
        outside -= 1
        row *= one[outside].length
    return row, outside


def _word(row_bytes: int, element_bytes: int) -> np.dtype[np.generic]:
    """Return the type in which rows are copied: a whole row if it is long, or an integer."""
    if row_bytes >= _ROW_BYTES_MIN:
        return np.dtype((np.void, row_bytes))
    nbytes = element_bytes
    while nbytes < _WORD_BYTES_MAX and row_bytes % (2 * nbytes) == 0:
        nbytes *= 2
    return np.dtype(f"u{nbytes}")


def _strided(
    memory: Bytes,
    start: int,
    word: np.dtype[np.generic],
    shape: Sequence[int],
    strides: Sequence[int],
) -> _Words:
    first = memory[..., start : start + word.itemsize].view(word)
    return as_strided(first, shape, strides)


def _copy(to: _Words, source: _Words) -> None:
    """Copy words in passes that numpy makes with long inner loops.

    The inner loop of numpy is along the smallest stride of what it writes. If this axis has very
    few elements (the pairs of tokens of `amx`), a pass for each of them takes half the time.
    """
    axes = [axis for axis in range(_BATCH_AXES, to.ndim) if to.shape[axis] > 1]
    inner = min(axes, key=lambda axis: to.strides[axis], default=None)
    if inner is None or to.shape[inner] > _SHORT_AXIS:
        np.copyto(to, source)
        return
    for at in range(to.shape[inner]):
        index = (slice(None),) * inner + (at,)
        np.copyto(to[index], source[index])
