"""What to load and save of a request, in every KV group of the model: blocks, keys and pages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from holdfast.blocks.group_rules import unit_tokens
from holdfast.blocks.key import KEY_BYTES
from holdfast.client.tasks import GroupTask, SaveTask
from holdfast.client.tracked_request import TrackedRequest
from holdfast.engines.vllm.group_pages import GroupShape, PageLists
from holdfast.engines.vllm.kv_groups import NULL_PAGE
from holdfast.errors import BlockError
from holdfast.limits import CHAIN_BLOCKS_MAX

SAVE_BLOCKS = 1_024
"""Maximum number of blocks in one save task, and so in one `Reserve` request to the node."""

_UNKNOWN_KEY = bytes(KEY_BYTES)

_log = logging.getLogger("vllm.holdfast")


class GroupTasks:
    """Makes the tasks of requests, for KV groups of these shapes."""

    def __init__(self, shapes: Sequence[GroupShape]) -> None:
        first, rules = shapes[0], [shape.rule for shape in shapes]
        self.shapes = shapes
        self.is_plain = len(rules) == len(first.tables) == 1 and rules[0].attention == "full"
        """Whether any leading pages are a prefix: one KV group, of full attention."""
        self.unit_tokens = unit_tokens(rules)
        """Answers to lookups count in blocks of this many tokens."""
        self.step_tokens = first.page_tokens if self.is_plain else self.unit_tokens
        """A load ends at a multiple of this many tokens."""

    def loads(
        self, tracked: TrackedRequest, lists: PageLists, start: int, stop: int
    ) -> tuple[GroupTask, ...]:
        """Return the blocks of each group to load for a resume after `stop` tokens.

        If vLLM has no page for one of them, the load names a block that no store has: then it
        fails, and vLLM computes the tokens.
        """
        if self.is_plain:
            shape = self.shapes[0]
            page, size = shape.page_tokens, shape.rule.block_tokens
            wanted = list(lists[shape.tables[0]][start // page : stop // page])
            first_block, skipped = divmod(start, size)
            keys = tracked.keys(first_block, -(-stop // size))
            return (GroupTask(keys, wanted, skipped // page),)
        groups = []
        for number, shape in enumerate(self.shapes):
            try:
                blocks, pages = shape.load_pages(lists, stop, start)
            except BlockError as error:
                _log.error("context not loaded: %s", error)
                return (GroupTask((_UNKNOWN_KEY,) * len(tracked.chains), [NULL_PAGE]),)
            if blocks:
                keys = tracked.keys(blocks.start, blocks.stop, number)
                groups.append(GroupTask(keys, pages, 0, number))
        return tuple(groups)

    def resume_keys(self, tracked: TrackedRequest, tokens: int) -> dict[int, tuple[bytes, ...]]:
        """Return, by group, the keys of the blocks that a resume after `tokens` tokens needs.

        They are one string per rank. A group that needs no block is left out: a chunk ends there.
        """
        found: dict[int, tuple[bytes, ...]] = {}
        for number, shape in enumerate(self.shapes):
            if needed := shape.rule.needed(tokens):
                found[number] = tracked.keys(needed.start, needed.stop, number)
        return found

    def saves(
        self,
        tracked: TrackedRequest,
        scheduled: int,
        lists_of: Callable[[], PageLists],
        most: int = SAVE_BLOCKS,
    ) -> Iterator[SaveTask]:
        """Yield the saves of the blocks that a request fills in this step, each of `most` blocks.

        One of more blocks would delay others.
        """
        # A block is full if its tokens are known and computed; draft tokens are not known yet.
        request = tracked.request
        computed = min(request.num_computed_tokens + scheduled, request.num_tokens)
        tracked.extend()
        lists: PageLists | None = None
        for number, shape in enumerate(self.shapes):
            known = len(tracked.groups[number][0])
            full = min(known, computed // shape.rule.block_tokens, CHAIN_BLOCKS_MAX)
            saved = tracked.group_saved[number]
            if full <= saved or shape.rule.attention == "recurrent":
                continue
            lists = lists_of() if lists is None else lists
            for blocks, pages in shape.save_runs(lists, range(saved, full)):
                yield from _save_tasks(tracked, number, blocks, pages, most)
            tracked.group_saved[number] = full

    def state_saves(
        self, tracked: TrackedRequest, states: Sequence[tuple[int, int, int]]
    ) -> Iterator[SaveTask]:
        """Yield the saves of recurrent states that vLLM offers in this step."""
        tracked.extend()
        for number, shape in enumerate(self.shapes):
            if shape.rule.attention != "recurrent":
                continue
            for block, pages in shape.states(states):
                if block >= min(len(tracked.groups[number][0]), CHAIN_BLOCKS_MAX):
                    continue
                yield from _save_tasks(tracked, number, range(block, block + 1), pages, 1)
                if (block + 1) * shape.rule.block_tokens % self.unit_tokens == 0:
                    saved = tracked.group_saved
                    saved[number] = max(saved[number], block + 1)


def _save_tasks(
    tracked: TrackedRequest, group: int, blocks: range, pages: Sequence[int], most: int
) -> Iterator[SaveTask]:
    """Yield the saves of a run of blocks, each of at most `most` blocks."""
    chains, per_block = tracked.groups[group], len(pages) // len(blocks)
    for start in range(blocks.start, blocks.stop, most):
        stop, at = min(start + most, blocks.stop), start - blocks.start
        yield SaveTask(
            tracked.request.request_id,
            tracked.keys(start, stop, group),
            tuple(chain.parent(start) for chain in chains),
            tuple(chain.segment(start) for chain in chains),
            start,
            list(pages[at * per_block : (at + stop - start) * per_block]),
            tracked.hint.retention,
            group,
        )
