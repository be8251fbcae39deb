"""The interface of a device, which copies blocks between the arena and an engine's pages.

One call copies a whole batch of moves. Python threads of the engine compete for the GIL, so code
that takes it per block or page would be slow; a device takes it about once per batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from holdfast.buffers import SharedMapping
from holdfast.errors import BlockError


class Move(NamedTuple):
    """One block to copy: the offset of its payload in the arena, and its pages in the engine.

    The payload is `layers x pages_per_block` pages, layer by layer. `pages` may be a run of the
    block's pages; `first` is the index in the block of the first one.
    """

    payload: int
    pages: Sequence[int]
    first: int = 0


class Pages(NamedTuple):
    """An engine's pages. A page starts at `bases[layer] + page * stride_bytes`.

    `page_bytes` of each page are copied; `stride_bytes` may be larger (padding).
    """

    bases: tuple[int, ...]
    stride_bytes: int
    page_bytes: int
    pages: int
    pages_per_block: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return len(self.bases) * self.pages_per_block * self.page_bytes


class Transfer(Protocol):
    """A batch of moves in progress; a `Future[bool]` is one."""

    @abstractmethod
    def done(self) -> bool:
        """Return, without blocking, whether `result` would return at once."""

    @abstractmethod
    def result(self) -> bool:
        """Block until all copies have ended; return True if every byte was copied."""


class Device(Protocol):
    """Copies blocks. Pages and arena must stay mapped until the transfer is done.

    If `scatter` or `gather` raises, no copy is in progress, so pages and slots may be reused.
    """

    pages: Pages

    def mark(self) -> Any:
        """Return a point in the engine's queued work, after which `scatter` can start."""

    @abstractmethod
    def scatter(self, arena: SharedMapping, moves: Sequence[Move], after: Any = None) -> Transfer:
        """Copy payloads from the arena into pages; nothing else uses the pages until then."""

    @abstractmethod
    def gather(self, arena: SharedMapping, moves: Sequence[Move]) -> Transfer:
        """Copy whole blocks into the arena, with their contents after the work queued so far.

        Work queued after this call may overwrite the pages.
        """

    def close(self) -> None:
        """Wait for transfers, stop threads and release every arena."""


def rows(pages: Pages, arena: SharedMapping, moves: Sequence[Move]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of every page to copy: in the engine's memory, and in the arena.

    The order is the arena's, so that a whole payload is contiguous there. Raises BlockError for a
    page or payload out of bounds, before anything is yielded.
    """
    for move in moves:
        last = move.first + len(move.pages)
        if move.first < 0 or not move.pages or last > pages.pages_per_block:
            raise BlockError(
                f"pages {move.first} to {last} of a block requested, which has "
                f"{pages.pages_per_block}"
            )
        if min(move.pages) < 0 or max(move.pages) >= pages.pages:
            raise BlockError(f"pages {list(move.pages)} requested, the engine has {pages.pages}")
        if move.payload < 0 or move.payload + pages.payload_bytes > arena.nbytes:
            raise BlockError(
                f"a payload of {pages.payload_bytes} bytes at {move.payload} requested, "
                f"the arena has {arena.nbytes} bytes"
            )
    return _rows(pages, arena.address, moves)


def _rows(pages: Pages, start: int, moves: Sequence[Move]) -> Iterator[tuple[int, int]]:
    # Use plain integers: numpy releases the GIL for arrays of more than 500 numbers, and taking it
    # again from a busy thread costs up to 5 ms.
    stride, size = pages.stride_bytes, pages.page_bytes
    layer_bytes = pages.pages_per_block * size
    for move in moves:
        layer = start + move.payload + move.first * size
        for base in pages.bases:
            arena_page = layer
            for page in move.pages:
                yield base + page * stride, arena_page
                arena_page += size
            layer += layer_bytes
