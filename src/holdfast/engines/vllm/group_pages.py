"""Pages of blocks: from vLLM's lists of page numbers, one for each KV cache group; pure.

A block of a KV group has the pages of its tokens from each of the group's lists. A device takes
them list by list: the pages of a block are those of the first list, then those of the second one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.blocks.group_rules import GroupRule
from holdfast.devices.base import NO_PAGE
from holdfast.engines.vllm.kv_groups import NULL_PAGE
from holdfast.errors import BlockError

PageLists = Sequence[Sequence[int]]
"""The page numbers of a request, in the order of its tokens, by number of vLLM's KV cache group."""


class GroupShape(NamedTuple):
    """What the scheduler side knows of a KV group: its blocks, and the lists with their pages.

    `lookahead`: tokens after a block that its content depends on, too.
    """

    rule: GroupRule
    page_tokens: int
    tables: tuple[int, ...] = (0,)
    lookahead: int = 0

    @property
    def pages_per_block(self) -> int:
        """Pages of a block in each list."""
        return self.rule.block_tokens // self.page_tokens

    def load_pages(self, lists: PageLists, tokens: int, have: int) -> tuple[range, list[int]]:
        """Return the blocks that a resume after `tokens` tokens needs, and the pages they fill.

        `have`: leading tokens that the engine holds. Pages that it does not wait for are `NO_PAGE`:
        those of these tokens, and those that are older than a window. Raises BlockError if vLLM has
        no page for what the resume needs.
        """
        blocks = self.rule.needed(tokens, have)
        wanted = self._page_rule.needed(tokens, have)
        pages = []
        for block in blocks:
            for index, page in self._pages(lists, block):
                if index not in wanted:
                    pages.append(NO_PAGE)
                elif page in {NULL_PAGE, NO_PAGE}:
                    raise BlockError(
                        f"vLLM has no page {index} for {self.rule.attention} attention or state "
                        f"after {tokens} tokens"
                    )
                else:
                    pages.append(page)
        return blocks, pages

    @property
    def _page_rule(self) -> GroupRule:
        """The rule in pages; a recurrent state has one page in each list."""
        if self.rule.attention == "recurrent":
            return self.rule
        return self.rule._replace(block_tokens=self.page_tokens, step_tokens=self.page_tokens)

    def save_runs(self, lists: PageLists, blocks: range) -> Iterator[tuple[range, list[int]]]:
        """Yield the runs of blocks whose pages all are there, with their pages.

        vLLM puts pages aside that are older than a window, and has none before those it loads.
        """
        start, pages = blocks.start, list[int]()
        for block in blocks:
            found = [page for _, page in self._pages(lists, block)]
            if NULL_PAGE in found or NO_PAGE in found:
                if pages:
                    yield range(start, block), pages
                start, pages = block + 1, []
            else:
                pages += found
        if pages:
            yield range(start, blocks.stop), pages

    def states(self, offered: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield the blocks of recurrent state that vLLM offers completely, with their pages.

        `offered`: number of vLLM's KV cache group, page, and the tokens that the state has seen.
        """
        by_boundary: dict[int, dict[int, int]] = {}
        for table, page, tokens in offered:
            if table in self.tables and page != NULL_PAGE:
                by_boundary.setdefault(tokens, {})[table] = page
        for tokens, pages in sorted(by_boundary.items()):
            block, rest = divmod(tokens, self.rule.block_tokens)
            if block and not rest and pages.keys() == set(self.tables):
                yield block - 1, [pages[table] for table in self.tables]

    def _pages(self, lists: PageLists, block: int) -> Iterator[tuple[int, int]]:
        """Yield the number in its list, and the page number, of each page of a block."""
        size = self.pages_per_block
        for table in self.tables:
            pages = lists[table]
            for index in range(block * size, (block + 1) * size):
                yield index, pages[index] if index < len(pages) else NO_PAGE
