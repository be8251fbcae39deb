"""Saves that wait until vLLM is about to use a block's pages again (`save: before_eviction`).

vLLM keeps the pages of ended requests, and takes those unused for longest when it needs pages. A
block that is still there is found by vLLM itself, so copying it out can wait until its pages are
among the next that vLLM takes. A block is saved together with those before it in its context: the
store finds a context from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from holdfast.client.tasks import SaveTask

_BlockName: TypeAlias = tuple[int, bytes]
"""The KV group of a block, and its key for the first rank."""


class _DeferredBlock(NamedTuple):
    """A full block: its save, and vLLM's hash of each of its pages, which tells if it is intact."""

    save: SaveTask
    hashes: tuple[Any, ...]


class DeferredSaves:
    """Full blocks that are not saved yet, by their pages. Used by the scheduler's thread only.

    `pool`: vLLM's pool of pages. `watched`: how many of the pages that vLLM takes next are looked
    at in each step: as many as it may take before the step after.
    """

    def __init__(self, pool: Any, watched: int, most: int) -> None:
        """`most`: the most blocks of one save."""
        self._pool = pool
        self._watched = watched
        self._most = most
        self._blocks: dict[_BlockName, _DeferredBlock] = {}
        self._by_page: dict[int, dict[int, _BlockName]] = {}
        """Blocks by page and KV group: layers of several groups may have the same pages."""
        self.lost = 0
        """Blocks whose pages vLLM has used before they were saved."""

    def put(self, save: SaveTask) -> bool:
        """Keep the save of one block for later; False if its pages are not kept by vLLM."""
        name = _name(save)
        if name in self._blocks:
            return True
        hashes = tuple(self._pool.blocks[page].block_hash for page in save.pages)
        if None in hashes:
            return False
        for page in save.pages:
            earlier = self._by_page.get(page, {}).get(save.group)
            if earlier is not None:
                self._forget(earlier)
                self.lost += 1
            self._by_page.setdefault(page, {})[save.group] = name
        self._blocks[name] = _DeferredBlock(save, hashes)
        return True

    def due(self) -> list[SaveTask]:
        """Return the saves of blocks whose pages vLLM takes next, and of those before them."""
        due: list[SaveTask] = []
        if self._blocks:
            free = self._pool.free_block_queue.iter_blocks_after(None)
            for _, page in zip(range(self._watched), free, strict=False):
                for name in [*self._by_page.get(page.block_id, {}).values()]:
                    due += self._take_with_ancestors(name)
        return list(_joined(due, self._most))

    def clear(self) -> None:
        """Forget all blocks: they are not to be saved any more."""
        self._blocks.clear()
        self._by_page.clear()

    def _take_with_ancestors(self, name: _BlockName) -> Iterator[SaveTask]:
        while (block := self._blocks.get(name)) is not None:
            self._forget(name)
            if self._is_intact(block):
                yield block.save
            else:
                self.lost += 1
            name = (block.save.group, block.save.parents[0])

    def _is_intact(self, block: _DeferredBlock) -> bool:
        pages = zip(block.save.pages, block.hashes, strict=True)
        return all(self._pool.blocks[page].block_hash == known for page, known in pages)

    def _forget(self, name: _BlockName) -> None:
        save = self._blocks.pop(name).save
        for page in save.pages:
            of_groups = self._by_page[page]
            del of_groups[save.group]
            if not of_groups:
                del self._by_page[page]


def _name(save: SaveTask) -> _BlockName:
    return save.group, save.keys[0]


def _joined(saves: Iterable[SaveTask], most: int) -> Iterator[SaveTask]:
    """Yield the saves with those joined that follow each other, up to `most` blocks."""
    runs: dict[_BlockName, list[SaveTask]] = {}
    for save in sorted(saves, key=lambda each: (each.group, each.depth)):
        run = runs.pop((save.group, save.parents[0]), [])
        if len(run) == most:
            yield _join(run)
            run = []
        runs[_name(save)] = [*run, save]
    yield from map(_join, runs.values())


def _join(run: list[SaveTask]) -> SaveTask:
    first = run[0]
    return first._replace(
        keys=tuple(map(b"".join, zip(*(save.keys for save in run), strict=True))),
        pages=[page for save in run for page in save.pages],
    )
