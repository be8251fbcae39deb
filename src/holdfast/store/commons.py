"""The public domain: contexts that everybody may use, that only a publisher writes, and that stay.

For system prompts, tool descriptions, documents that all tenants share. Its blocks are never
evicted from memory and come back there after a restart before anybody asks, so whether one is a
hit depends on no user, and tells nothing about any. A reader gets a copy under its own domain's
names: nothing of the public arena is lent out, and what users save never gets into it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from holdfast.blocks.key import SEGMENT_BYTES
from holdfast.blocks.world import World
from holdfast.codec.pack import payload
from holdfast.policy.retention import Retention
from holdfast.store import save
from holdfast.store.core import Core
from holdfast.store.fetch import fetch, lend
from holdfast.store.states import HOST
from holdfast.tiers.base import NOWHERE

BLOCKS_MAX = 512
"""Leading blocks of a chain that are looked for in the public domain: 64K tokens at 128 a block."""

_FETCH_S = 5.0
_WARM_S = 60.0


def borrowable(store: Core, world: World, keys: Sequence[bytes], common: Sequence[bytes]) -> bool:
    """Whether the public domain holds more of a chain in memory than the reader's; state only."""
    index, public = store.states.index, _public(store, world)
    with store.states.lock:
        own = index.cover(world, keys).blocks
        if own >= min(len(common), BLOCKS_MAX):
            return False
        theirs = index.cover(public, common[: own + 1])
    return theirs.blocks > own and theirs.tiers[own] == HOST


def borrow(store: Core, world: World, keys: Sequence[bytes], common: Sequence[bytes]) -> int:
    """Copy what the public domain holds of a chain, and the reader does not; return the blocks.

    `keys` names the chain in the reader's domain, `common` the same blocks in the public one.
    """
    own = store.cover_blocks(world, keys)
    fetched = fetch(store, _public(store, world), common[:BLOCKS_MAX], _FETCH_S)
    try:
        theirs = fetched.places[own : len(keys)]
        ticket = _copy(store, world, keys[: own + len(theirs)], theirs) if theirs else None
    finally:
        whole = store.release(fetched.lease)
    if ticket is None:
        return 0
    if not whole:
        save.abort(store, ticket)
        return 0
    # The public domain has it for good, so this copy need never be written anywhere.
    return save.commit(store, ticket, Retention.EPHEMERAL)


def _copy(store: Core, world: World, keys: Sequence[bytes], theirs: Sequence[int]) -> int:
    """Copy public slots to new ones for the last of `keys`; return the ticket, to be committed."""
    public, own = _public(store, world), len(keys) - len(theirs)
    parent = keys[own - 1] if own else world.fingerprint
    head = keys[own - own % store.states.segment_blocks][:SEGMENT_BYTES]
    reserved = save.reserve(store, world, keys[own:], parent, own, head)
    try:
        for place, source in zip(reserved.places, theirs, strict=True):
            if place != NOWHERE:
                record = payload(store.record(public, source), world.payload_bytes)
                payload(store.record(world, place), world.payload_bytes)[:] = record
    except BaseException:
        save.abort(store, reserved.ticket)
        raise
    return reserved.ticket


def warm(store: Core) -> int:
    """Bring the public domain's blocks to memory, after a restart, or when its keys are back.

    Return how many are there.
    """
    if not (store.states.public and store.states.lower):
        return 0
    index = store.states.index
    worlds: dict[World, list[tuple[int, bytes]]] = defaultdict(list)
    with store.states.lock:
        for row in index.rows():
            world, key = index.world(row), index.keys[row]
            if world.domain == store.states.public and key is not None:
                worlds[world].append((index.depths[row], key))
    blocks = 0
    for world, named in worlds.items():
        lent = lend(store, world, [key for _, key in sorted(named)], _WARM_S)
        blocks += len(lent.places)
        store.release(lent.lease)
    return blocks


def _public(store: Core, world: World) -> World:
    return world._replace(domain=store.states.public)
