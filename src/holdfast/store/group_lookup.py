"""Coverage of a context in several KV groups: after how many tokens an engine can resume.

Each group has a namespace and a chain of its own, and a rule that says which of its blocks a resume
needs. The answer is one number of tokens for which all groups are held, and one plan for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from holdfast.blocks.group_rules import GroupRule, longest_resume, resume_points, unit_tokens
from holdfast.blocks.namespace import Namespace
from holdfast.errors import NotFollowed, Outcome
from holdfast.plan.planner import PlanQuestion
from holdfast.session import LOOK_S, RECOVERING
from holdfast.store.block_table import HOST
from holdfast.store.core import StoreParts
from holdfast.store.lookup import PlannedFetch, PromptTokens, ask_tier, look, with_queue
from holdfast.store.plan_log import PlanRecord
from holdfast.tiers.base import is_away

POINTS_ASKED = 4
"""Resume points, the longest first, for which shared tiers are asked about groups without runs."""

_NOT_HELD = -1
_NONE: Mapping[str, Outcome] = MappingProxyType({})


class GroupChain(NamedTuple):
    """One context in one KV group: its namespace, its rule, and the keys of its blocks."""

    namespace: Namespace
    rule: GroupRule
    keys: Sequence[bytes]


def cover_groups(
    store: StoreParts, groups: Sequence[GroupChain], limit: int = 0, have: int = 0
) -> int:
    """Return the most tokens after which an engine can resume, by what the index knows.

    `limit`: most tokens; 0: all that the chains name. `have`: leading tokens that the engine holds.
    """
    held = _held(_tiers(store, groups))
    return longest_resume([group.rule for group in groups], held, limit or _tokens(groups), have)


def look_groups(
    store: StoreParts,
    groups: Sequence[GroupChain],
    prompt_tokens: int = 0,
    have: int = 0,
    within_s: float = LOOK_S,
) -> dict[str, Outcome]:
    """Ask shared tiers about blocks that the index does not know; return those without an answer.

    A tier answers about leading runs. So groups whose blocks are all saved are asked for theirs,
    and then each group for what it lacks at the longest resume points of the others. Waits for at
    most `within_s` in all.
    """
    until = time.monotonic() + within_s
    unanswered: dict[str, Outcome] = {}
    if not store.table.shared:
        return unanswered
    for group in groups:
        if group.rule.attention != "recurrent":
            left_s = max(0.0, until - time.monotonic())
            unanswered |= look(store, group.namespace, group.keys, left_s).unanswered
    limit = _limit(groups, prompt_tokens)
    for tokens in _points_of_runs(store, groups, limit, have):
        for group, tiers in zip(groups, _tiers(store, groups), strict=True):
            blocks = group.rule.needed(tokens, have)
            lacks = [block for block in blocks if block >= len(tiers) or tiers[block] == _NOT_HELD]
            for number, tier in store.table.shared.items() if lacks else ():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return unanswered | {tier.name: Outcome.LATE}
                if not is_away(tier):
                    keys = group.keys[: blocks.stop]
                    ask_tier(store.table, number, group.namespace, keys, lacks[0], left_s)
        if cover_groups(store, groups, tokens, have) == tokens:
            break
    return unanswered if cover_groups(store, groups, limit, have) < limit else {}


def plan_groups(
    store: StoreParts,
    groups: Sequence[GroupChain],
    prompt: PromptTokens,
    unanswered: Mapping[str, Outcome] = _NONE,
) -> PlannedFetch:
    """Plan after how many tokens to resume, by what the index knows of all groups.

    The answer counts in blocks of the unit of all groups. The planner weighs equal blocks: each has
    an equal share of the bytes to load, and the slowest tier of what a group needs there. Its cut
    moves down to the next point at which an engine can resume.
    """
    began_s = store.clock.now()
    rules, unit = [group.rule for group in groups], unit_tokens([group.rule for group in groups])
    away = {number for number, tier in store.table.shared.items() if is_away(tier)}
    tiers = [
        [_NOT_HELD if tier in away else tier for tier in each] for each in _tiers(store, groups)
    ]
    limit = _limit(groups, prompt.tokens)
    points = list(resume_points(rules, _held(tiers), limit, prompt.have))
    held = points[0] // unit if points else 0
    cost, delivery = store.estimates.cost(prompt.engine)
    by_unit, nbytes = _units(groups, tiers, points[0] if points else 0, prompt.have)
    names = store.table.tier_names()
    question = PlanQuestion(
        tiers=by_unit,
        block_bytes=nbytes,
        block_tokens=unit,
        estimates=with_queue(store, groups[0].namespace, prompt),
        names=names,
        limit_s=prompt.limit_s,
        queued_s=cost.queue_s(prompt.queued) if cost is not None else 0.0,
        cost=cost,
        prompt_tokens=prompt.tokens,
        have_tokens=prompt.have,
        delivery=delivery,
    )
    plan, number = store.planner.plan(question), 0
    cut = next((point for point in points if point <= plan.blocks * unit), prompt.have)
    plan = plan._replace(blocks=cut // unit)
    if prompt.instead_of and plan.blocks < held:  # the request has got its turn
        with store.table.lock:
            for group in groups:
                store.pending_hints.withdraw(group.namespace, group.keys, prompt.waits_in)
    if store.recovery.is_running and held * unit < limit // unit * unit:
        plan = plan._replace(reason=f"{plan.reason}; {RECOVERING}")
    if not points:
        store.plan_log.not_followed(prompt.engine, prompt.instead_of, NotFollowed.HAD)
    elif prompt.tokens:
        record = PlanRecord(
            engine=prompt.engine,
            prompt_tokens=prompt.tokens,
            have_tokens=prompt.have,
            held=held,
            plan=plan,
            block_bytes=nbytes,
            first_block=question.first,
        )
        number = store.plan_log.add(record, prompt.instead_of)
    outcome = Outcome.OK if points else Outcome.MISS
    store.activity.call("lookup", outcome, store.clock.now() - began_s, held)
    taken = by_unit[question.first : plan.blocks]
    sources = {names[tier]: taken.count(tier) for tier in sorted(set(taken))}
    missing = {names[tier]: Outcome.GONE for tier in away} | dict(unanswered)
    return PlannedFetch(held, sources, plan, number, missing if held < limit // unit else {})


def _points_of_runs(
    store: StoreParts, groups: Sequence[GroupChain], limit: int, have: int
) -> Iterator[int]:
    """Return resume points of the groups with full attention; of all tokens if there is none."""
    full = [group for group in groups if group.rule.attention == "full"]
    unit = unit_tokens([group.rule for group in groups])
    if not full:
        return islice(range(limit // unit * unit, have, -unit), POINTS_ASKED)
    points = resume_points([group.rule for group in full], _held(_tiers(store, full)), limit, have)
    return islice((point for point in points if point % unit == 0), POINTS_ASKED)


def _units(
    groups: Sequence[GroupChain], tiers: Sequence[Sequence[int]], tokens: int, have: int
) -> tuple[bytes, int]:
    """Return the slowest tier for each unit of a resume after `tokens`, and its share of bytes."""
    unit = unit_tokens([group.rule for group in groups])
    by_unit, total = bytearray(tokens // unit), 0
    for group, held in zip(groups, tiers, strict=True):
        size = group.rule.block_tokens
        for block in group.rule.needed(tokens, have) if tokens else ():
            total += group.namespace.slot_bytes
            for at in range(block * size // unit, -(-(block + 1) * size // unit)):
                if at < len(by_unit):
                    by_unit[at] = max(by_unit[at], held[block])
    return bytes(by_unit), total // max(1, (tokens - have) // unit)


def _limit(groups: Sequence[GroupChain], prompt_tokens: int) -> int:
    """Return the most tokens to resume after: an engine computes a prompt's last token."""
    tokens = _tokens(groups)
    return min(tokens, prompt_tokens - 1) if prompt_tokens else tokens


def _tokens(groups: Sequence[GroupChain]) -> int:
    return min(len(group.keys) * group.rule.block_tokens for group in groups)


def _held(tiers: Sequence[Sequence[int]]) -> list[list[bool]]:
    return [[tier != _NOT_HELD for tier in each] for each in tiers]


def _tiers(store: StoreParts, groups: Sequence[GroupChain]) -> list[list[int]]:
    """Return the fastest tier of each block of each group; `_NOT_HELD` for a block without one."""
    index, found = store.table.index, []
    with store.table.lock:
        host = store.table.copies.places(HOST)
        for group in groups:
            rows = index.find_all(group.namespace, group.keys)
            found.append(
                [
                    _NOT_HELD if row < 0 else HOST if host[row] >= 0 else index.fastest(row)
                    for row in rows
                ]
            )
    return found
