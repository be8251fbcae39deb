"""The interface of a device: blocks from the arena to an engine's pages, and back.

One call moves a whole plan. An engine's process is busy in Python, so whatever takes the GIL per
block or per page collapses there; a device takes it once per plan, or nearly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from holdfast.errors import BlockError


class Memory(Protocol):
    """The arena: mapped bytes that outlive every transfer they take part in."""

    @property
    def address(self) -> int:
        """Where the first byte lies."""
        ...

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        ...

    @property
    def view(self) -> memoryview:
        """The same bytes, writable."""
        ...


class Move(NamedTuple):
    """One block: where its payload starts in the arena, and the pages of the engine it fills.

    The payload is `layers x pages_per_block` pages, layer by layer. `pages` may name only some of
    the block's pages, in order; `first` is the index in the block of the first one.
    """

    payload: int
    pages: Sequence[int]
    first: int = 0


class Pages(NamedTuple):
    """An engine's pages: `bases[layer] + page * stride_bytes` is where a page starts.

    `page_bytes` of each page are moved; `stride_bytes` may be larger (padding).
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
    """A plan that is being moved."""

    def done(self) -> bool:
        """Say, without blocking, whether `wait` would return at once."""
        ...

    def wait(self) -> bool:
        """Block until everything stopped moving; True if every byte arrived."""
        ...


class Device(Protocol):
    """Moves blocks. Pages and arena must stay mapped until the transfer is done.

    When `scatter` or `gather` raises nothing moves any more: pages and slots are others' then.
    """

    pages: Pages

    def mark(self) -> Any:
        """Return a point in the engine's queued work, for `scatter` to start after."""
        ...

    def scatter(self, arena: Memory, moves: Sequence[Move], after: Any = None) -> Transfer:
        """Copy payloads out of the arena into pages; nothing else may use these pages."""
        ...

    def gather(self, arena: Memory, moves: Sequence[Move]) -> Transfer:
        """Copy pages into the arena, as they are after the work the caller has queued so far.

        The pages may be overwritten by work queued after this call.
        """
        ...

    def close(self) -> None:
        """Wait for transfers, stop threads and let go of every arena."""
        ...


def rows(pages: Pages, arena: Memory, moves: Sequence[Move]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of every page moved: in the engine's memory, and in the arena.

    In the arena's order, so that a whole payload is a run there. Raises BlockError for a page or
    a place that lies outside, before anything is yielded.
    """
    for move in moves:
        _check(pages, arena, move)
    return _rows(pages, arena.address, moves)


def _rows(pages: Pages, start: int, moves: Sequence[Move]) -> Iterator[tuple[int, int]]:
    # Plain integers on purpose: numpy lets go of the GIL for arrays of more than 500 numbers, and
    # beside a busy thread each time costs up to 5 ms.
    stride, size = pages.stride_bytes, pages.page_bytes
    layer_bytes = pages.pages_per_block * size
    for move in moves:
        layer = start + move.payload + move.first * size
        for base in pages.bases:
            far = layer
            for page in move.pages:
                yield base + page * stride, far
                far += size
            layer += layer_bytes


def _check(pages: Pages, arena: Memory, move: Move) -> None:
    last = move.first + len(move.pages)
    if move.first < 0 or not move.pages or last > pages.pages_per_block:
        raise BlockError(
            f"pages {move.first} to {last} of a block asked, it has {pages.pages_per_block}"
        )
    if min(move.pages) < 0 or max(move.pages) >= pages.pages:
        raise BlockError(f"pages {list(move.pages)} asked, the engine has {pages.pages}")
    if move.payload < 0 or move.payload + pages.payload_bytes > arena.nbytes:
        raise BlockError(
            f"a payload of {pages.payload_bytes} bytes at {move.payload} asked, "
            f"the arena has {arena.nbytes} bytes"
        )
