"""The interface of a device, which copies blocks between the arena and an engine's pages.

One call copies a whole batch of moves. Python threads of the engine compete for the GIL, so code
that takes it per block or page would be slow; a device takes it about once per batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from holdfast.buffers import Registrar, SharedMapping
from holdfast.errors import BlockError, HoldfastError

NO_PAGE = -1
"""In a list of a block's pages: a page that is not to be copied."""


class DeviceError(HoldfastError):
    """A device that cannot be used, or whose call failed; the message states why."""


class Move(NamedTuple):
    """One block to copy: the offset of its payload in the arena, and its pages in the engine.

    `pages` may be a run of the block's pages; `first` is the index in the block of the first one.
    """

    payload: int
    pages: Sequence[int]
    first: int = 0


class LayerPages(NamedTuple):
    """Layers whose pages have one size. A page starts at `bases[layer] + page * stride_bytes`.

    `page_bytes` of each page are copied; `stride_bytes` may be larger (padding).
    """

    bases: tuple[int, ...]
    stride_bytes: int
    page_bytes: int


class Pages(NamedTuple):
    """An engine's pages: one or several groups of layers, each with a page size of its own.

    A page number names one page of every layer. A payload has the groups in their order, and in
    each group `layers x pages_per_block` pages, layer by layer.

    `lists` above 1: an engine has as many lists of page numbers, one for the layers of each group.
    A page number then names pages of one group, and a block has `pages_per_block / lists` pages of
    each list, list by list. Only portable blocks may have such pages.
    """

    groups: tuple[LayerPages, ...]
    pages: int
    pages_per_block: int
    lists: int = 1

    @classmethod
    def uniform(
        cls,
        bases: tuple[int, ...],
        stride_bytes: int,
        page_bytes: int,
        pages: int,
        pages_per_block: int,
    ) -> Pages:
        """Return pages of one size in all layers."""
        return cls((LayerPages(bases, stride_bytes, page_bytes),), pages, pages_per_block)

    @property
    def bytes_of_page(self) -> int:
        """Bytes of one page number, all layers; of one page number of every list."""
        return sum(len(group.bases) * group.page_bytes for group in self.groups)

    @property
    def raw_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.bytes_of_page * self.pages_per_block // self.lists


class Transfer(Protocol):
    """A batch of moves in progress; a `Future[bool]` is one."""

    @abstractmethod
    def done(self) -> bool:
        """Return, without blocking, whether `result` would return at once."""

    @abstractmethod
    def result(self) -> bool:
        """Block until all copies have ended; return True if every byte was copied."""


class LockedRanges(Protocol):
    """The ranges of one arena that are page-locked for this process, with a count of their users.

    A range is an offset in the arena and a number of bytes. Memory in use stays locked. Each chunk
    is locked by itself, so a copy must not cross a multiple of `chunk_bytes`.
    """

    chunk_bytes: int

    @abstractmethod
    def use(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Count a user of every range, and return True; False, and no user, if one is not locked.

        It must not be called for memory whose copies could start much later: the node asks for
        memory back, and waits only for a few seconds.
        """

    @abstractmethod
    def done(self, ranges: Sequence[tuple[int, int]]) -> None:
        """End a user, whose copies have ended: `ranges` are those of one call of `use`."""

    @abstractmethod
    def want(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask for ranges that were copied without a lock, so that later copies find them locked."""


class Device(Protocol):
    """Copies blocks. Pages and arena must stay mapped until the transfer is done.

    If a call raises, no copy of it is in progress, so pages and slots may be reused. A device
    saves either at once (`DirectDevice`) or in two steps (`StagingDevice`).
    """

    pages: Pages

    @property
    @abstractmethod
    def failure(self) -> str:
        """Why every later call fails, such as an error of the GPU; empty while the device works."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a point in the engine's queued work, after which `scatter` can start.

        If it raises DeviceError, the device has failed, and `scatter` raises, too.
        """

    @abstractmethod
    def scatter(
        self,
        arena: SharedMapping,
        moves: Sequence[Move],
        after: Any = None,
        locks: LockedRanges | None = None,
        proceed: Callable[[], bool] | None = None,
    ) -> Transfer:
        """Copy payloads from the arena into pages; nothing else uses the pages until then.

        A device that copies a long batch in pieces calls `proceed` before each piece. If it returns
        False, no further piece is copied, and the transfer's result is False.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for transfers, stop threads and release every arena."""


class DirectDevice(Device, Protocol):
    """A device that copies pages into the arena at once: the engine's thread waits for it."""

    @abstractmethod
    def gather(
        self, arena: SharedMapping, moves: Sequence[Move], locks: LockedRanges | None = None
    ) -> Transfer:
        """Copy whole blocks into the arena, with their contents after the work queued so far.

        Work queued after this call may overwrite the pages.
        """


class StagedBlocks(Protocol):
    """Memory of the device for whole blocks on their way to the arena."""

    @abstractmethod
    def pack(self) -> None:
        """Queue the copy of the blocks out of their pages, after the engine's work so far.

        Work that the engine queues after this call may overwrite the pages.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Return, without blocking, whether the blocks have left their pages."""

    @abstractmethod
    def copy(
        self,
        arena: SharedMapping,
        payloads: Sequence[tuple[int, int]],
        locks: LockedRanges | None = None,
    ) -> Transfer:
        """Copy blocks into the arena: the number of each, in the stage, and its payload's offset.

        The blocks must be ready, so that the copy starts at once: the node reuses a slot some time
        after its session has ended.
        """

    @abstractmethod
    def release(self) -> None:
        """Let the memory be used for other blocks, as soon as all copies of these have ended."""


class CopiedBytes(NamedTuple):
    """Bytes that a device has copied between arenas and its memory, since it was opened."""

    locked: int
    """Page-locked memory: at the speed of the bus."""
    bounced: int
    """Other memory, through buffers of the driver."""


@runtime_checkable
class LockingDevice(Device, Protocol):
    """A device that copies page-locked memory faster; `registrar` locks memory for its copies.

    `locks_by_default` False: it locks only if the node's operator has given a size to lock.
    """

    registrar: Registrar
    locks_by_default: bool

    @abstractmethod
    def copied_bytes(self) -> CopiedBytes:
        """Return how much has been copied, in both directions."""


@runtime_checkable
class StagingDevice(LockingDevice, Protocol):
    """A device with memory in which saved blocks wait until they have places in the arena."""

    @abstractmethod
    def stage(self, blocks: Sequence[Sequence[int]]) -> StagedBlocks | None:
        """Reserve memory for whole blocks; `blocks` has the pages of each.

        Returns None if the memory is in use by earlier blocks, or is too small.
        """


def rows(
    pages: Pages, arena: SharedMapping, moves: Sequence[Move]
) -> Iterator[tuple[int, int, int]]:
    """Yield every page to copy: its address in the engine's memory and in the arena, its bytes.

    The order is the arena's, so that a whole payload is contiguous there. Raises BlockError for a
    page or payload out of bounds, before anything is yielded.
    """
    check(pages, arena, moves)
    return _rows(pages, arena.address, moves)


def check(pages: Pages, arena: SharedMapping, moves: Sequence[Move], raw_bytes: int = 0) -> None:
    """Raise BlockError for a page or payload out of bounds.

    `raw_bytes`: bytes of a payload in the arena; default: those of a block's pages.
    """
    raw_bytes = raw_bytes or pages.raw_bytes
    for move in moves:
        check_pages(pages, move)
        check_payload(arena, move.payload, raw_bytes)


def check_payload(arena: SharedMapping, payload: int, raw_bytes: int) -> None:
    """Raise BlockError for a payload outside the arena."""
    if payload < 0 or payload + raw_bytes > arena.nbytes:
        raise BlockError(
            f"a payload of {raw_bytes} bytes at {payload} requested, "
            f"the arena has {arena.nbytes} bytes"
        )


def check_whole_block(pages: Pages, numbers: Sequence[int]) -> None:
    """Raise BlockError unless these are as many pages as a block has, as a save needs them."""
    if len(numbers) != pages.pages_per_block:
        raise BlockError(
            f"{len(numbers)} pages of a block to save, which has {pages.pages_per_block}"
        )


def check_pages(pages: Pages, move: Move) -> None:
    """Raise BlockError if a move names pages that the block or the engine does not have."""
    last = move.first + len(move.pages)
    if move.first < 0 or not move.pages or last > pages.pages_per_block:
        raise BlockError(
            f"pages {move.first} to {last} of a block requested, which has {pages.pages_per_block}"
        )
    if min(move.pages) < 0 or max(move.pages) >= pages.pages:
        raise BlockError(f"pages {list(move.pages)} requested, the engine has {pages.pages}")


def _rows(pages: Pages, start: int, moves: Sequence[Move]) -> Iterator[tuple[int, int, int]]:
    # Use plain integers: numpy releases the GIL for arrays of more than 500 numbers, and taking it
    # again from a busy thread costs up to 5 ms.
    per_block = pages.pages_per_block
    for move in moves:
        group_start = start + move.payload
        for bases, stride, size in pages.groups:
            layer = group_start + move.first * size
            layer_bytes = per_block * size
            for base in bases:
                arena_page = layer
                for page in move.pages:
                    yield base + page * stride, arena_page, size
                    arena_page += size
                layer += layer_bytes
            group_start += len(bases) * layer_bytes
