"""Rules of KV groups: which blocks of each group an engine needs to resume after n tokens; pure.

A model with several kinds of layers keeps several groups of blocks. A prefix of n tokens can be
resumed only if every group holds what it needs for exactly this n. Full attention needs all blocks,
a window or chunk the last ones, and recurrent state one checkpoint, which can be neither stepped
back nor cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.blocks.fingerprint import Attention, KvGroup
from holdfast.errors import BlockError


class GroupRule(NamedTuple):
    """What a KV group needs for a resume, in blocks of `block_tokens` tokens.

    `window`: tokens of the window or chunk, the token that attends included; 0 for the other kinds.
    A resume is possible after a multiple of `step_tokens`, which divides `block_tokens`: the
    engine's page, of which a block has several, or the block itself. Block i of a recurrent group
    is the state after (i + 1) * block_tokens tokens.
    """

    attention: Attention
    window: int
    block_tokens: int
    step_tokens: int

    @classmethod
    def of(cls, group: KvGroup, block_tokens: int, step_tokens: int = 0) -> GroupRule:
        """Return the rule of a group; default of `step_tokens`: `block_tokens`.

        Raises BlockError for sizes that do not fit.
        """
        step = block_tokens if group.attention == "recurrent" else step_tokens or block_tokens
        if block_tokens < 1 or step < 1 or block_tokens % step:
            raise BlockError(
                f"block_tokens is {block_tokens}, step_tokens {step_tokens}; a block must be a "
                "whole number of steps"
            )
        return cls(group.attention, group.window, block_tokens, step)

    def needed(self, tokens: int, have: int = 0) -> range:
        """Return the blocks of this group that a resume after `tokens` tokens needs.

        `have`: leading tokens that the engine holds itself, in all groups; it can resume after
        them. Raises BlockError unless `tokens` is a multiple of the step.
        """
        if tokens < 0 or tokens % self.step_tokens:
            raise BlockError(
                f"a resume after {tokens} tokens is not possible; pass a multiple of "
                f"{self.step_tokens}"
            )
        stop = -(-tokens // self.block_tokens)
        if tokens <= have:
            return range(stop, stop)
        if self.attention == "recurrent":
            return range(stop - 1, stop)
        # The token at position `tokens` attends to positions from `first` on. The engine can resume
        # after `have`, so it holds what a later window or chunk has in common with that of `have`.
        first = 0
        if self.attention == "window":
            first = max(0, tokens + 1 - self.window)
        elif self.attention == "chunk":
            first = tokens // self.window * self.window
        first = max(first, have)
        return range(first // self.block_tokens if first < tokens else stop, stop)


def unit_tokens(rules: Sequence[GroupRule]) -> int:
    """Return the unit of resumes: the smallest number of tokens that all steps divide."""
    return math.lcm(*(rule.step_tokens for rule in rules))


def resume_points(
    rules: Sequence[GroupRule], held: Sequence[Sequence[int]], limit: int, have: int = 0
) -> Iterator[int]:
    """Yield, from the longest down, every number of tokens above `have` that can be resumed.

    `held[g][i]` is true if block i of group g is held; blocks beyond its end are not. `limit`: most
    tokens; an engine computes at least the last token of a prompt, so it passes their number - 1.
    Raises BlockError if the number of groups differs.
    """
    if not rules or len(rules) != len(held):
        raise BlockError(f"{len(rules)} rules for {len(held)} groups; pass one for each group")
    runs = [_runs(each) for each in held]
    unit = unit_tokens(rules)
    for tokens in range(limit // unit * unit, have, -unit):
        if all(_holds(rule, run, tokens, have) for rule, run in zip(rules, runs, strict=True)):
            yield tokens


def longest_resume(
    rules: Sequence[GroupRule], held: Sequence[Sequence[int]], limit: int, have: int = 0
) -> int:
    """Return the most tokens after which every group can resume; `have` if no more than those."""
    return next(resume_points(rules, held, limit, have), have)


def _holds(rule: GroupRule, runs: Sequence[int], tokens: int, have: int) -> bool:
    blocks = rule.needed(tokens, have)
    return not blocks or (blocks.stop <= len(runs) and runs[blocks.stop - 1] >= len(blocks))


def _runs(held: Sequence[int]) -> list[int]:
    """Return, for each block, the number of consecutive blocks held that end with it."""
    runs, run = [], 0
    for each in held:
        run = run + 1 if each else 0
        runs.append(run)
    return runs
