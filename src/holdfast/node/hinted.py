"""Hints over the wire: each names a session or a chain, and is answered with what it is about."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.blocks.world import World
from holdfast.errors import BlockError
from holdfast.policy.retention import Retention
from holdfast.store.store import Store
from holdfast.wire import messages as m


def take(store: Store, world: World, keys: Sequence[bytes], hint: m.Closed | m.Returns) -> m.Hinted:
    """Take a hint about a session of this world's domain; state only."""
    if isinstance(hint, m.Closed):
        return m.Hinted(store.closed(world.domain, hint.session))
    if keys:
        store.follow(world, hint.session, keys)
    return m.Hinted(store.returns(world.domain, hint.session, hint.in_s))


def bring(store: Store, world: World, keys: Sequence[bytes], hint: m.Prestage | m.Pin) -> m.Hinted:
    """Take a hint about a chain; a pin reads from lower tiers."""
    if isinstance(hint, m.Prestage):
        return m.Hinted(store.prestage(world, keys, hint.in_s))
    return m.Hinted(store.pin(world, keys, hint.ttl_s))


def retention(name: str) -> Retention:
    """Return a class of contexts by its name; raise BlockError for one that is not known."""
    try:
        return Retention(name)
    except ValueError as error:
        known = ", ".join(Retention)
        raise BlockError(f"commit.retention: {name[:80]!r} is not one of {known}") from error
