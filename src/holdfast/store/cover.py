"""Coverage: what of a chain is held here, and what the shared tiers say they hold.

What a shared tier answers is remembered in the index as hearsay: a place that may turn out empty.
Then the fetch finds a miss, the hearsay goes, and the block is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.index.residency import Coverage
from holdfast.plan.planner import Plan, Question
from holdfast.store.core import Core
from holdfast.store.hearsay import forget_oldest
from holdfast.store.judgement import Engine, Record
from holdfast.store.states import HOST, States
from holdfast.tiers.base import Shared, Tier, is_away, segment_place

LOOK_S = 1.0
"""How long all questions about one chain may take, other people's answers included."""

_log = logging.getLogger("holdfast.store")


class Prompt(NamedTuple):
    """Who asks for how much: tokens of the prompt (0: not known), leading ones it has already.

    `limit_s`: most that a fetch may take. `instead_of`: number of an earlier plan for the same
    prompt, which this one replaces.
    """

    engine: Engine
    tokens: int
    have: int
    limit_s: float
    instead_of: int = 0


class Judged(NamedTuple):
    """What is held of a prompt, in leading blocks, and what of it is worth fetching.

    `sources` counts the blocks to be fetched by tier; `number` names the plan, 0: there is none.
    """

    held: int
    sources: dict[str, int]
    plan: Plan
    number: int


class Covered(NamedTuple):
    """How many leading blocks are held, and how many of them would come from each tier."""

    blocks: int
    sources: dict[str, int]


class _Wanted(NamedTuple):
    """A question: a chain's keys, the block from which on they are asked about, and how long."""

    keys: Sequence[bytes]
    start: int
    within_s: float


def cover(states: States, world: World, keys: Sequence[bytes]) -> Covered:
    """Count the leading blocks that the index knows of; state only."""
    with states.lock:
        coverage = states.index.cover(world, keys)
    return Covered(coverage.blocks, sources(states, coverage, coverage.blocks))


def look(states: States, world: World, keys: Sequence[bytes]) -> Covered:
    """Count the leading blocks, asking the shared tiers about those the index does not know.

    `keys` starts with the first block of the chain. Waits for an answer, or for somebody else's who
    asks the same: `LOOK_S` in all, however many are asked.
    """
    covered, until = cover(states, world, keys), time.monotonic() + LOOK_S
    for number, tier in enumerate(states.lower, start=1):
        left_s = until - time.monotonic()
        if covered.blocks < len(keys) and left_s > 0 and isinstance(tier, Shared) and asked(tier):
            _ask(states, world, number, _Wanted(keys, covered.blocks, left_s))
            covered = cover(states, world, keys)
    return covered


def asks(states: States, world: World, keys: Sequence[bytes]) -> bool:
    """Return whether `look` would ask anybody."""
    there = any(asked(tier) for tier in states.lower)
    return there and cover(states, world, keys).blocks < len(keys)


def asked(tier: Tier) -> bool:
    """Return whether a tier is one to ask, and anybody is there who would be."""
    return isinstance(tier, Shared) and not is_away(tier)


def _ask(states: States, world: World, number: int, wanted: _Wanted) -> None:
    """Ask one shared tier about the blocks from `start` on, unless somebody does or just did."""
    keys, start, within_s = wanted
    tier, name, found = states.lower[number - 1], (number, keys[start]), 0
    with states.lock:
        other = states.asking.begin(name, states.clock.now())
    if other is not None:
        other.wait(within_s)
        return
    try:
        found = _held(tier, world, wanted)
        _note(states, world, number, keys[: start + found], start)
    finally:
        with states.lock:
            states.asking.end(name, found, states.clock.now())


def _held(tier: Tier, world: World, wanted: _Wanted) -> int:
    """Ask; what goes wrong there costs nobody what is held here."""
    try:
        return tier.held(world, *wanted) if isinstance(tier, Shared) else 0
    except Exception:  # noqa: BLE001  # a tier may be anybody's
        _log.exception("asking failed tier=%s", tier.name)
        return 0


def judge(store: Core, world: World, keys: Sequence[bytes], prompt: Prompt) -> Judged:
    """Decide what of the leading blocks that the index knows of is worth fetching."""
    states, judgement = store.states, store.judgement
    with states.lock:
        coverage = _within_reach(states, states.index.cover(world, keys))
    cost, delivery = judgement.cost(prompt.engine)
    question = Question(
        tiers=coverage.tiers,
        block_bytes=world.record_bytes,
        block_tokens=world.block_tokens,
        estimates=judgement.estimates(world.domain),
        names=states.tier_names(),
        limit_s=prompt.limit_s,
        cost=cost,
        prompt_tokens=prompt.tokens,
        have_tokens=prompt.have,
        delivery=delivery,
    )
    plan, number = store.planner.plan(question), 0
    if question.first < coverage.blocks:
        record = Record(
            prompt.engine, prompt.tokens, prompt.have, coverage.blocks, plan, world.record_bytes
        )
        number = judgement.planned(record, prompt.instead_of)
        if plan.blocks < coverage.blocks:
            _aim(store, world, coverage.tiers[plan.blocks], keys[plan.blocks])
            if cost is None:  # an engine that tells nothing
                probe(store)
    wanted = coverage._replace(tiers=coverage.tiers[question.first :])
    taken = sources(states, wanted, plan.blocks - question.first)
    return Judged(coverage.blocks, taken, plan, number)


def _within_reach(states: States, coverage: Coverage) -> Coverage:
    """Leave out what lies behind a block that only a tier has whose every member is silent."""
    away = {number for number in states.shared if not asked(states.lower[number - 1])}
    if away.isdisjoint(coverage.tiers):
        return coverage
    blocks = next(at for at, tier in enumerate(coverage.tiers) if tier in away)
    return coverage._replace(rows=coverage.rows[:blocks], tiers=coverage.tiers[:blocks])


def _aim(store: Core, world: World, tier: int, key: bytes) -> None:
    """Have one block brought up that is not worth it, now and then: its tier may be faster now."""
    if tier != HOST and store.judgement.wants_probe(tier):
        with store.states.lock:
            store.probes[tier] = world, key


def probe(store: Core) -> None:
    """Bring up what is to be probed. Meant for when engines have told how their steps went.

    To read and verify it takes a core for milliseconds, which an engine on CPUs that has just been
    told to compute would wait for.
    """
    if not store.probes:
        return
    with store.states.lock:
        aimed, store.probes = store.probes, {}
    for world, key in aimed.values():
        with store.states.lock:
            row = store.states.index.find(key)
            held = row >= 0 and store.states.holds(row, world)
            climbs = store.ladder.claim(world, [row] if held else [])
        for wave in store.ladder.climb(world, climbs):
            wave.reading.add_done_callback(lambda _: store.judgement.settle())


def sources(states: States, coverage: Coverage, blocks: int) -> dict[str, int]:
    """Count the first `blocks` of a coverage by tier."""
    tiers = coverage.tiers[:blocks]
    return {states.tier_name(tier): tiers.count(tier) for tier in sorted(set(tiers))}


def _note(states: States, world: World, number: int, keys: Sequence[bytes], start: int) -> None:
    with states.lock:
        for depth in reversed(range(start, len(keys))):  # the oldest goes first: the tail
            head = keys[depth - depth % states.segment_blocks]
            parent = keys[depth - 1] if depth else world.fingerprint
            row = states.index.add(world, keys[depth], parent, depth)
            states.publish_below(row, number, segment_place(head[:SEGMENT_BYTES]))
            states.hearsay[keys[depth]] = number
    forget_oldest(states)
