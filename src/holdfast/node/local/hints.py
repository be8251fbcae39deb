"""Hints over the wire: each names a session or a chain; the answer is the number of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.blocks.namespace import Namespace
from holdfast.errors import BlockError
from holdfast.policy.retention import Retention
from holdfast.store.store import Store
from holdfast.wire.local import messages as m


def take(
    store: Store, namespace: Namespace, keys: Sequence[bytes], hint: m.Closed | m.Returns
) -> m.Hinted:
    """Take a hint about a session of this namespace's domain. Changes state only, no I/O."""
    if isinstance(hint, m.Closed):
        return m.Hinted(store.closed(namespace.domain, hint.session))
    if keys:
        store.follow(namespace, hint.session, keys)
    return m.Hinted(store.returns(namespace.domain, hint.session, hint.in_s))


def take_chain(
    store: Store, namespace: Namespace, keys: Sequence[bytes], hint: m.Prestage | m.Pin | m.Returns
) -> m.Hinted:
    """Take a hint about a chain. Asks shared tiers; a pin also reads from lower tiers."""
    if isinstance(hint, m.Returns):
        return take(store, namespace, keys, hint)
    if isinstance(hint, m.Prestage):
        return m.Hinted(store.prestage(namespace, keys, hint.in_s))
    return m.Hinted(store.pin(namespace, keys, hint.ttl_s))


def retention(name: str) -> Retention:
    """Return the retention class of this name; raise BlockError for an unknown name."""
    try:
        return Retention(name)
    except ValueError as error:
        known = ", ".join(Retention)
        raise BlockError(f"commit.retention: {name[:80]!r} is not one of {known}") from error
