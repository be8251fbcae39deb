"""The memory of pages in SGLang's host pools.

Most pools give the addresses of their pages, so blocks are copied between the pool and the node's
arena, and nothing in between. For the other pools a page is copied as a flat tensor by the pool's
own methods. The memory of a page is a list of ranges, whose bytes follow each other in the block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.errors import BlockError
from holdfast.named_blocks import BlockMemory


class PageBuffers(Protocol):
    """The memory of some pages during one call. Keep it until the call returns."""

    memory: Sequence[BlockMemory]

    @abstractmethod
    def take(self, whole: Sequence[bool]) -> None:
        """Put the pages that were read whole in their place in the pool."""


class PoolPages(Protocol):
    """The pages of one host pool. `indices`: SGLang's numbers of host tokens, one per token."""

    page_bytes: int
    arrangement: str
    """How the bytes of a page follow each other, beyond the pool's layout."""

    @abstractmethod
    def to_save(self, indices: Any) -> PageBuffers:
        """Return the memory with the content of these pages."""

    @abstractmethod
    def to_load(self, indices: Any) -> PageBuffers:
        """Return memory to read these pages to."""


def pages_of(pool: Any, *, in_place: bool) -> PoolPages:
    """Return the pages of a pool: in place if that is wished and the pool gives addresses."""
    import torch

    if in_place:
        first = torch.arange(int(pool.page_size), dtype=torch.int64)
        try:
            _, sizes = pool.get_page_buffer_meta(first)
        except (AttributeError, NotImplementedError, ValueError):
            pass  # the pool's layout has no addresses of pages
        else:
            return PagesInPlace(pool, [int(size) for size in sizes])
    return FlatPages(pool)


class PagesInPlace:
    """Pages whose addresses the pool gives: `ranges` of these sizes each."""

    arrangement = "ranges"

    def __init__(self, pool: Any, sizes: Sequence[int]) -> None:
        self._pool = pool  # its memory lives as long as this object
        self._ranges = len(sizes)
        self.page_bytes = sum(sizes)

    def to_save(self, indices: Any) -> PageBuffers:
        return self.to_load(indices)

    def to_load(self, indices: Any) -> PageBuffers:
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        ranges = list(zip(addresses, sizes, strict=True))
        step = self._ranges
        return _InPlace([ranges[at : at + step] for at in range(0, len(ranges), step)])


class _InPlace:
    def __init__(self, memory: Sequence[BlockMemory]) -> None:
        self.memory = memory

    def take(self, whole: Sequence[bool]) -> None:
        """Do nothing: the memory is the pool's."""


class FlatPages:
    """Pages that the pool's own methods copy to flat tensors and back."""

    arrangement = "flat"

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._page_size = int(pool.page_size)
        page = pool.get_data_page(0, flat=True)
        self._dtype, self._elements = page.dtype, page.numel()
        self.page_bytes = page.numel() * page.element_size()

    def to_save(self, indices: Any) -> PageBuffers:
        firsts = self._firsts(indices)
        pages = [self._pool.get_data_page(first, flat=True).contiguous() for first in firsts]
        return _Flat(self._pool, firsts, pages)

    def to_load(self, indices: Any) -> PageBuffers:
        import torch

        firsts = self._firsts(indices)
        pages = [torch.empty(self._elements, dtype=self._dtype) for _ in firsts]
        return _Flat(self._pool, firsts, pages)

    def _firsts(self, indices: Any) -> list[int]:
        return [int(index) for index in indices[:: self._page_size]]


class _Flat:
    def __init__(self, pool: Any, firsts: Sequence[int], pages: Sequence[Any]) -> None:
        self._pool, self._firsts, self._pages = pool, firsts, pages
        self.memory: Sequence[BlockMemory] = [tensor_memory(page) for page in pages]

    def take(self, whole: Sequence[bool]) -> None:
        for first, page, good in zip(self._firsts, self._pages, whole, strict=True):
            if good:
                self._pool.set_from_flat_data_page(first, page)


def tensor_memory(tensor: Any) -> BlockMemory:
    """Return the memory of a tensor; raise BlockError unless it is contiguous, on the CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise BlockError(f"a page is a tensor on {tensor.device}, not contiguous memory of the CPU")
    return [(tensor.data_ptr(), tensor.numel() * tensor.element_size())]
