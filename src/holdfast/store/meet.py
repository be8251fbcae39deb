"""Read a little from each tier that nobody has read yet, so that the first plan is no guess.

The bytes go nowhere: what counts is how long they take. Tiers of other nodes are left alone: what
they hold is hearsay, and the first request that finds a block there asks soon enough.
"""

from __future__ import annotations

import itertools

from holdfast.blocks.world import World
from holdfast.buffers import aligned_buffer
from holdfast.errors import Outcome
from holdfast.store.core import Core
from holdfast.store.states import States
from holdfast.tiers.base import Get, Place, Shared

BLOCKS = 8
"""What is read of a tier: as much as climbs at once."""

_ROWS_LOOKED_AT = 4_096


def strangers(store: Core) -> list[int]:
    """Return the tiers with blocks that nobody has read yet, as numbers of the ladder."""
    return [
        number
        for number, tier in enumerate(store.states.lower, start=1)
        if not isinstance(tier, Shared)
        and not store.judgement.reads(number)
        and tier.usage().records >= BLOCKS
    ]


def meet(store: Core, number: int) -> None:
    """Read a few blocks of one tier, and let the store know how long that took."""
    states = store.states
    with states.lock:
        rows = _some(states, number)
        if not rows or store.judgement.reads(number):
            return
        world = states.index.world(rows[0])
        batch = [_get(states, world, number, row) for row in rows]
        states.pin(rows)
    size, outcomes = world.record_bytes, list[Outcome]()
    store.judgement.asked(number, len(batch) * size, world.domain)
    try:
        outcomes = states.lower[number - 1].read(batch)
    finally:
        arrived = outcomes.count(Outcome.OK) * size
        store.judgement.arrived(number, arrived, world.domain, of=len(batch) * size)
        with states.lock:
            states.unpin(rows)


def _some(states: States, number: int) -> list[int]:
    """Return a few rows of one world that lie on a tier."""
    rows: list[int] = []
    for row in itertools.islice(states.index.rows(), _ROWS_LOOKED_AT):
        if states.index.places[number][row] < 0:
            continue
        if not rows or states.index.world(row) == states.index.world(rows[0]):
            rows.append(row)
        if len(rows) == BLOCKS:
            break
    return rows


def _get(states: States, world: World, number: int, row: int) -> Get:
    place = Place(states.index.places[number][row])
    key = states.index.keys[row] or b""
    return Get(place, key, aligned_buffer(world.record_bytes), world)
