"""Coverage: what of a chain is held here, and what the shared tiers say they hold.

What a shared tier answers is remembered in the index as a hint: a place that may turn out empty.
Then the fetch finds a miss, the hint goes, and the block is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.index.residency import Coverage
from holdfast.limits import SEGMENT_BLOCKS
from holdfast.store.states import States
from holdfast.tiers.base import NOWHERE, Shared, segment_place

HINTS_MAX = 1 << 18
"""Blocks known only by hearsay; the oldest are forgotten beyond."""


class Covered(NamedTuple):
    """How many leading blocks are held, and how many of them would come from each tier."""

    blocks: int
    sources: dict[str, int]


def cover(states: States, world: World, keys: Sequence[bytes]) -> Covered:
    """Count the leading blocks that the index knows of; state only."""
    with states.lock:
        coverage = states.index.cover(world, keys)
    return Covered(coverage.blocks, sources(states, coverage, coverage.blocks))


def look(states: States, world: World, keys: Sequence[bytes]) -> Covered:
    """Count the leading blocks, asking the shared tiers about those the index does not know.

    `keys` starts with the first block of the chain. Waits for an answer, a bounded time.
    """
    covered = cover(states, world, keys)
    for number, tier in enumerate(states.lower, start=1):
        if isinstance(tier, Shared) and covered.blocks < len(keys):
            found = tier.held(world, keys, covered.blocks)
            _note(states, world, number, keys[: covered.blocks + found], covered.blocks)
            covered = cover(states, world, keys)
    return covered


def sources(states: States, coverage: Coverage, blocks: int) -> dict[str, int]:
    """Count the first `blocks` of a coverage by tier."""
    tiers = coverage.tiers[:blocks]
    return {states.tier_name(tier): tiers.count(tier) for tier in sorted(set(tiers))}


def _note(states: States, world: World, number: int, keys: Sequence[bytes], start: int) -> None:
    with states.lock:
        for depth in reversed(range(start, len(keys))):  # the oldest hints go first: the tail
            head = keys[depth - depth % SEGMENT_BLOCKS]
            parent = keys[depth - 1] if depth else world.fingerprint
            row = states.index.add(world, keys[depth], parent, depth)
            states.publish(row, number, segment_place(head[:SEGMENT_BYTES]))
            states.hints[keys[depth]] = number
        while len(states.hints) > HINTS_MAX:
            key, tier = states.hints.popitem(last=False)
            _forget(states, states.index.find(key), tier)


def _forget(states: States, row: int, number: int) -> None:
    """Drop a hint, unless the block has come to lie here meanwhile or is being read."""
    if row < 0 or states.index.leases[row] or row in states.loading:
        return
    known = [tier for tier, column in enumerate(states.index.places) if column[row] != NOWHERE]
    if known == [number]:
        states.vacate(row, number)
